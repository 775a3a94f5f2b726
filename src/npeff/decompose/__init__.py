"""Decompositions: NPEFF, G-NPEFF, gradient clustering, TopK autoencoder and SVD behind one interface."""

from npeff.decompose.base import Decomposition, Order, create, kind_of, load
from npeff.decompose.clusters import Clusters
from npeff.decompose.config import METHODS, FitConfig, PaperConfig, SaeConfig
from npeff.decompose.npeff import GradientNpeff, Npeff
from npeff.decompose.sae import Sae
from npeff.decompose.svd import ActivationSvd, GradientSvd

__all__ = [
    "METHODS",
    "ActivationSvd",
    "Clusters",
    "Decomposition",
    "FitConfig",
    "GradientNpeff",
    "GradientSvd",
    "Npeff",
    "Order",
    "PaperConfig",
    "Sae",
    "SaeConfig",
    "create",
    "kind_of",
    "load",
]
