"""A run on a page of its own while it trains, and its network behind a small JSON API once there are weights."""
