"""Auditing a score by experiment: the script's own `main` runs in worlds that differ in one thing.

`audit` is the verb `prove`. `laws` has the experiments, `equalities` what must be equal between their runs,
and `worlds` and `settings` what the runs are given. `box` starts them behind `walls`, with a `clock` of its
own. `replay` scores documents of a real run again, and `unexecuted` names the branches that no run took. The
auditor never shares a process with the script, and looks inside it in only one place (`box.keep_ledgers`).
"""
