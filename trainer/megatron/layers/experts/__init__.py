"""Computes layers whose MLP is a choice of experts for each token.

A layer spec names `layer.ExpertLayer`, which builds an `ExpertMLP` (or a subclass) from a router and this
rank's experts:

    experts and weights of each token    router.ExpertRouter(x [T, H], RoutedTokens | None) -> Routing
    rows sorted by expert                dispatch.ExpertOrder.rows_of(x) -> [R, H]
    to the ranks of the experts          dispatch.Exchange.send
    outputs of the experts               layer.LocalExperts(rows [R, H], rows of each expert [L]) -> [R, H],
    back, and summed for each token      dispatch.Exchange.return_rows, ExpertOrder.combine

A family with another routing rule extends `router.scores_of`, `choose` and `weights_of`, with new fields of
`families.experts.Experts`. A family with other experts overrides `ExpertMLP.make_experts`. If
`RoutedTokens.experts` is set, routers use these experts.
"""
