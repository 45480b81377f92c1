"""Every closed set of names, once: `Literal` aliases for annotations and the same names as tuples for code.

It imports nothing, so that the help of the command line reads it without torch. Registries and help texts are compared
with it by a test.
"""

from __future__ import annotations

from typing import Literal, get_args

# Shortcuts and networks
Auto = Literal["auto"]
AlphaMin = float | Auto
AlphaSchedule = Literal["linear", "constant", "cosine"]
ShortcutVia = Literal["network", "groups"]
ShortcutForm = Literal["identity", "branch", "both", "attention", "mlp", "learnable", "plain"]
ProfileOptimizer = Literal["adamw", "muon", "sgd", "lion"]
BranchKind = Literal["attention", "mlp"]
ModelFamily = Literal["vit", "mae", "uvit", "sit", "resnet"]
Positions = Literal["sincos", "learned"]
HeadPooling = Literal["class", "mean"]
Gelu = Literal["none", "tanh"]
Stem = Literal["auto", "cifar", "imagenet"]

# Data
Augmentation = Literal["crop", "center", "none"]
CropKind = Literal["crop", "pad", "center", "none"]
Resize = Literal["auto", "margin"]
PixelType = Literal["8-bit", "uint8", "uint16", "int16", "float16", "float32"]
Stretch = Literal["linear", "log", "asinh"]

CacheKind = Literal["pixels", "features", "index", "listings", "hashes"]

# Training
Algorithm = Literal["adamw", "muon"]
LearningRateSchedule = Literal["cosine", "constant"]
WeightDecayOn = Literal["matrices", "all"]
Precision = Literal["float32", "bfloat16"]
Gpu = Literal["t4", "v100", "a10", "a40", "a100", "l40s", "rtx4090", "h100", "h200"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Objective = Literal["masked_reconstruction", "supervised", "finetuning", "noise_prediction", "flow_matching"]
Weights = Literal["raw", "ema"]
RunState = Literal["running", "stopped", "finished"]
CheckState = Literal["ok", "note", "problem"]
Cluster = Literal["slurm", "local"]

# Diffusion
Process = Literal["vp", "discrete", "flow"]
Sampler = Literal["dpm-solver", "dpm-solver++", "euler-maruyama", "heun", "euler", "dopri5", "sde"]
Prediction = Literal["noise", "data"]
GuidanceForm = Literal["added", "scaled"]

# Evaluation and search
Pooling = Literal["class", "mean", "all"]
Vector = Literal["class", "mean", "all", "flat"]
AllLayers = Literal["all"]
Scaling = Literal["raw", "centered", "standardized", "whitened"]
KnnScaling = Literal["raw", "standardized", "whitened"]
Centering = Literal["columns", "rows", "none"]
ProbeProtocol = Literal["logistic", "in100", "mae"]
CheckpointMetric = Literal["probe", "knn"]
SearchEngine = Literal["auto", "torch", "faiss", "approximate"]
VerdictWord = Literal["learning", "plateaued", "collapsed", "too short", "worse than raw pixels"]

# Weights
ExportTarget = Literal["timm", "transformers", "hub-folder", "safetensors", "onnx", "torch-export"]

# What `anechoic list` lists
Listed = Literal["models", "recipes", "metrics", "sources"]


def names(choice: object) -> tuple[str, ...]:
    """Return the names of one of the aliases above."""
    return get_args(choice)
