"""What Ridgeline runs, as frozen data: models, caches, engine. Standard library only."""
