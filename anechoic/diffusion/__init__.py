"""Diffusion and flow models: processes, samplers, generation."""
