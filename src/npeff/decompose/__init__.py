"""Decompositions: NPEFF, G-NPEFF, gradient clustering, TopK autoencoder and SVD behind one interface."""
