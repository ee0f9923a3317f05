"""Secure sums: a server learns the sum of the sites' vectors and no vector of a single site.

The protocol is that of Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving
machine learning", with two masks a site and against a server that lies. A sum takes five exchanges;
any sites may drop out of it as long as `threshold` of them stay:

    keys        a site draws two key pairs and the seed of its own mask, and signs the public parts
    shares      it deals shares of its mask's key and of the seed to the others, each under a key
                that only the two sites know
    masked      it sends its vector plus its own mask plus a mask with every other site, of which
                the other one subtracts the same
    survivors   it signs the list of the sites whose vectors arrived
    reveal      given `threshold` signatures under the same list, it reveals its shares: of the
                seeds of the sites on the list, of the mask's keys of those that dropped out

This package knows nothing of networks, files or models: `site_session` is the part of a site,
`sum_session` that of the server, on vectors of a `Ring`. What is random, secret or signed comes
from `cryptography`; only the sharing of secrets is written here.
"""
