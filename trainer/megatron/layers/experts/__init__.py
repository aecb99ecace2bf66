"""Computes layers whose MLP is a choice of experts for each token.

`layer.ExpertLayer` is what a layer spec names; it makes an `ExpertMLP` (or a class that derives from it) of
`router.Router` and `layer.ExpertStack`:

    weights, experts of each token   Router(x [T, H], RoutedTokens | None) -> Routing
    rows sorted by expert            dispatch.Order
    to the ranks of the experts      dispatch.Exchange.send
    what experts compute             ExpertStack(rows [R, H], rows of each expert [L]) -> [R, H]
    and back, in the tokens' order   dispatch.Exchange.give_back, Order.by_token

A family with another choice extends `router.scores_of`, `choose` and `weights_of`, by fields of
`architecture.experts.Experts`; one with other experts overrides `ExpertMLP.make_experts`.
"""
