"""Where raw pictures become feature rows: `local` (a tower in this process) or `pool` (encoders).

A source gives checked rows or raises ChiasmError; it never blocks the event loop.
"""
