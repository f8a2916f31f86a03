"""What runs Chiasm elsewhere: images, manifests, monitoring, and the scripts around them."""
