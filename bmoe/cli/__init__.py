"""The command line: flags in, text on stdout, everything else on stderr; `commands/` has the others, a module each.

Imports: abi, accounting, analysis, engine, experts, host, inspect, llama, observe, speculation.
"""
