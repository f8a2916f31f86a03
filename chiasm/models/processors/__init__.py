"""Image processors of our own, where transformers has none that does without torchvision."""
