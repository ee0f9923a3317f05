"""Published bounds with their constants and conditions, and closed forms to compare with them.

Modules:

    conditions      records of a bound and its conditions; the two lemmas that tune a step size
    quadratic       "A Sharper Analysis of Scaffold on Quadratics" (tag 000), corrected
    stochastic      "Scaffold with Stochastic Gradients: New Analysis ..." (tag 002)
    original        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (tag 004)
    lambda_norm     the exact factor of one round in the norm that the bounds of 000 and 002 use
    xi_form         the round and the stationary covariance block by block, as 000 writes them
    expansion       first-order covariance and bias of SCAFFOLD and FedAvg on smooth problems
    sample_rounds   runs on quadratics with noise, exact in law
    speed_up        linear speed-up in the number of clients, as far as it is proved
"""
