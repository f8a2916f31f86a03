"""The page at `/`, to try what is served: static files, and no other state than the browser's."""
