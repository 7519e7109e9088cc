/* The page: alignment of direct reads (it covers logical blocks of 512 and 4096 bytes) and unit of residency. */
#ifndef BMOE_PAGE_H
#define BMOE_PAGE_H

#define BM_PAGE 4096

#endif
