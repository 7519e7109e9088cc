# Used from C only: see ext/bmoe/streamer/_router.pxd.
