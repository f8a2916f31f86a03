"""How many encoders and LLM services a load needs: rates in, replicas and waits out.

Pure arithmetic over measured rates; knows no service, no socket and no torch. `chiasm plan` asks
it, docs/operations.md says how well it holds against a simulation.
"""
