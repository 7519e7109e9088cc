# Used from C only: see ext/bmoe/streamer/_route_log.pxd.
