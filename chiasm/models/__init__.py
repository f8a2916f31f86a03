"""Model families: the one place that knows a checkpoint's two halves.

`identity`, `checkpoint`, `contract`, `family` and `families` import no torch; `vision` and
`language` load one half of a checkpoint each.
"""
