/* Maps of a file whose pages cannot be read any more (it has shrunk, its disk fails) raise SIGBUS where they are
 * touched. For ranges that are guarded here the rest of the map becomes zeros instead and the guard is marked: who
 * owns the map then refuses what was computed. Every other SIGBUS goes to whoever had the signal before. */
#ifndef BM_SIGBUS_H
#define BM_SIGBUS_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BM_GUARDS 256

static struct { volatile uintptr_t start, end; volatile int hit; } bm_guards[BM_GUARDS];
static struct sigaction bm_sigbus_before;
static pthread_mutex_t bm_guards_lock = PTHREAD_MUTEX_INITIALIZER;
static int bm_sigbus_installed;
static uintptr_t bm_page;

static void bm_on_sigbus(int number, siginfo_t *info, void *context) {
    int saved = errno, i;
    uintptr_t at = (uintptr_t)info->si_addr;
    if (info->si_code > 0)
        for (i = 0; i < BM_GUARDS; i++)
            if (bm_guards[i].start <= at && at < bm_guards[i].end) {
                uintptr_t page = at & ~(bm_page - 1);
                if (mmap((void *)page, bm_guards[i].end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
                    != MAP_FAILED) {
                    bm_guards[i].hit = 1;
                    errno = saved;
                    return;
                }
            }
    errno = saved;
    if (bm_sigbus_before.sa_flags & SA_SIGINFO)
        bm_sigbus_before.sa_sigaction(number, info, context);
    else if (bm_sigbus_before.sa_handler != SIG_DFL && bm_sigbus_before.sa_handler != SIG_IGN)
        bm_sigbus_before.sa_handler(number);
    else
        sigaction(SIGBUS, &bm_sigbus_before, NULL); /* returning repeats the access, now for the default action */
}

/* Guards [start, end); the guard's number, or -1 where there are too many. */
static int bm_guard(uintptr_t start, uintptr_t end) {
    int i;
    pthread_mutex_lock(&bm_guards_lock);
    if (!bm_sigbus_installed) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = bm_on_sigbus;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        bm_page = (uintptr_t)sysconf(_SC_PAGESIZE);
        bm_sigbus_installed = sigaction(SIGBUS, &action, &bm_sigbus_before) == 0;
    }
    for (i = 0; i < BM_GUARDS && bm_guards[i].end; i++)
        ;
    if (i < BM_GUARDS) {
        bm_guards[i].hit = 0;
        bm_guards[i].start = start;
        bm_guards[i].end = end;
    }
    pthread_mutex_unlock(&bm_guards_lock);
    return i < BM_GUARDS ? i : -1;
}

static void bm_unguard(int i) {
    pthread_mutex_lock(&bm_guards_lock);
    bm_guards[i].end = bm_guards[i].start = 0;
    pthread_mutex_unlock(&bm_guards_lock);
}

static int bm_guard_hit(int i) { return bm_guards[i].hit; }

#endif
