"""What traces and CSV files of runs say: readers that trust nothing, replays, statistics, pages. No model.

Nothing here is loaded by a run: commands load the modules that they need.

Imports: accounting, experts, observe, streamer.
"""
