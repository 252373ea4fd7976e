"""Training-time DeepSeek-V4 attention: masks, schedules, backends, and the models and measurements around them."""
