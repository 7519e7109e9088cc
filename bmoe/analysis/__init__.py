"""What traces and CSV files of runs say: readers that trust nothing, replays, statistics, pages. No model.

`table` reads, `route_trace`, `io_trace` and `run_csv` know what; `replay`, `locality` and `run_stats` make figures of
it, `trace_page`, `run_page` and `plots` draw them. No run loads any of this, and a command only what it needs: the
modules are the face.

Imports: accounting, experts, observe, streamer.
"""
