"""Who may ask: API keys from a file, and how much each may ask for."""
