"""The OpenAPI document of this server: https://spec.openapis.org/oas/v3.1.1.html

Requests are described by the models that check them, answers by models that exist for this only
(`answers.py`), and `operations.py` says what each route takes and gives. Loaded when the document
is first asked for.
"""
