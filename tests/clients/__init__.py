"""OpenAI's own clients and those that others build on them, against a real `chiasm up`.

`make clients` brings their environments under `build/clients` and runs `python -m tests.clients`.
"""
