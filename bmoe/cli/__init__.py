"""The command line: flags in, text on stdout, everything else on stderr.

`main` is its front door, `flags` and `draft_flags` what can be asked, `commands/` the other commands, a module each.
`terminal`, `text_output`, `token_output`, `status_line`: what goes where; `summary`, `summary_table`, `evidence`,
`metrics_file`: the end of a run. A module is loaded where it is needed: they are the face.

Imports: abi, accounting, analysis, engine, experts, host, inspect, llama, observe, speculation.
"""
