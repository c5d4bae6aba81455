"""Models of other things than pictures, films and sound."""

from __future__ import annotations

import torch

from sweep_models import Built, case, kept, noise, times


@case("RFD4ProteinaTransformer", published={"nlayers": 1})
def proteina() -> Built:
    """Protein structure: attention with a bias per pair of residues."""
    config = {
        "nlayers": 2,
        "token_dim": 24,
        "nheads": 2,
        "dim_cond": 12,
        "pair_repr_dim": 10,
        "latent_dim": 4,
        "token_type_emb_dim": 6,
        "cath_emb_dim": 6,
        "t_emb_dim": 8,
        "seq_sep_dim": 8,
        "xt_pair_dist_dim": 6,
        "feats_seq": ("xt_bb_ca", "xt_local_latents"),
        "feats_cond_seq": ("time_emb_bb_ca",),
        "feats_pair_repr": ("xt_bb_ca_pair_dists",),
        "feats_pair_cond": ("time_emb_bb_ca",),
        "tri_mult_c": 8,
    }
    return config, {
        "bb_ca": noise(2, 7, 3),
        "local_latents": noise(2, 7, 4),
        "bb_ca_time": times(0.2, 0.7),
        "local_latents_time": times(0.3, 0.6),
        "padding_mask": kept(7, 5, of=7),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(2, 7, dtype=torch.bool),
            "supports_local_latent": torch.ones(2, 7, dtype=torch.bool),
        },
    }
