"""What things cost: counters, time, bytes by cause, and the records and results made of these. Pure.

Imports: host.
"""
