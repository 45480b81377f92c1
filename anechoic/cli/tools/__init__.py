"""The commands under `anechoic tools`: what is needed now and then, around a training."""
