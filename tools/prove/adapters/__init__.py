"""Adapters for scripts of another kind: what an author fills in so that `prove` can ask a script questions.

`baseline` is for the challenge's public baseline, `pr549` for PR #549's evaluation; README.md says how to
write one's own.
"""
