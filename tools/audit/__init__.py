"""The audit of a score by experiment: the script's own `main`, asked in worlds that differ in one thing.

`audit` is the verb `prove`, `laws` has the experiments, `equalities` what must be equal between their runs,
`worlds` and `settings` what the runs are given. `box` starts them behind `walls`, by a `clock` of its own.
`replay` scores documents of a real run again, `unexecuted` names the branches that no run took. The auditor
never shares a process with the script, and looks inside it in one place (`box.keep_ledgers`).
"""
