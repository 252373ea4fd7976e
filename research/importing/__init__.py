"""Published weights of DeepSeek-V4, in and out: `weights.load` and `weights.save`."""
