"""Pictures by http(s) URL: what may be fetched (`policy`), names (`lookup`), bytes (`download`)."""
