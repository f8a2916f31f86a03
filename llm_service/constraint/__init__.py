"""Structured output: from the form a request asks for to the tokens that may come next.

limits       every bound in one place         requested  the message to a grammar's text
json_schema  what a schema may hold           lark       what a grammar may hold
trial        a process that compiles first    proving    starts, times and kills that process
compiler     cache, trial, compile            matcher    one answer's state (engine's Constraint)
"""
