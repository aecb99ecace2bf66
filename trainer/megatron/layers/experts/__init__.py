"""Computes layers whose MLP is a choice of experts for each token.

`layer.ExpertLayer` is what a layer spec names; it makes an `ExpertMLP` (or a class that derives from it) of a
router and the experts of this rank:

    experts and weights of each token    router.ExpertRouter(x [T, H], RoutedTokens | None) -> Routing
    rows sorted by expert                dispatch.ExpertOrder.rows_of(x) -> [R, H]
    to the ranks of the experts          dispatch.Exchange.send
    what experts compute                 layer.LocalExperts(rows [R, H], rows of each expert [L]) -> [R, H],
    back, and summed for each token      dispatch.Exchange.give_back, ExpertOrder.combine

A family with another choice extends `router.scores_of`, `choose` and `weights_of`, by fields of
`families.experts.Experts`; one with other experts overrides `ExpertMLP.make_experts`. Where
`RoutedTokens.experts` is set, routers choose these.
"""
