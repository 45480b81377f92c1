"""The tables and figures of the paper: at pocket scale, which we ran, and at the scale of the paper."""
