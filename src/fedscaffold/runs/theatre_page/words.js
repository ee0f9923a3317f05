// The words of the play: methods, sliders, mistakes, and the lesson of six scenes.
"use strict";
const Words = {
  methods: {
    sgd: ["SGD", "one step a round: goes the right way, slowly"],
    fedavg: ["FedAvg", "many steps at each client, then the mean"],
    fedprox: ["FedProx", "the same, with each client on a lead"],
    scaffold: ["SCAFFOLD", "remembers each client's own pull, and takes it off"],
  },
  dials: [  // key, label, least, most, step, digits
    ["clients", "Clients", 2, 5, 1, 0],
    ["steps", "Local steps in a round", 1, 60, 1, 0],
    ["lr", "Step size", 0.02, 0.6, 0.02, 2],
    ["slopes", "How differently the clients pull (gradients)", 0, 1, 0.05, 2],
    ["curves", "How differently their valleys bend (Hessians)", 0, 0.7, 0.05, 2],
    ["noise", "Noise in every gradient", 0, 1, 0.05, 2],
    ["cohort", "Clients heard in a round", 1, 5, 1, 0],
  ],
  mistakes: [  // kind, label, in force after this round, up to this one, what happens
    ["lose", "Lose one client's memory", 2, 3,
      "In round 3 one client lost its memory: a disk was wiped, or a phone replaced."],
    ["twice", "Count one reply twice", 0, 1,
      "In round 1 one reply arrived twice, and was counted twice."],
    ["drop", "Lose 5 % of the replies", 0, 1e9,
      "Of the replies 5 % get lost after the client has stored its new memory."],
    ["momentum", "Momentum, memory from the distance walked", 0, 1e9,
      "Clients now gather speed, but still take the distance walked as if it had been plain steps."],
  ],
  unbroken: "The play starts again, with this one mistake in it.",
  stopped: "Stopped. What went wrong before stays in the memory: only a reset heals it.",
  base: { clients: 4, steps: 10, lr: 0.2, slopes: 0.8, curves: 0.6, noise: 0, cohort: 4 },
  tour: [  // label, changes to the base, caption, mistake
    ["1 Alike", { slopes: 0, curves: 0 },
      "All clients want the same. Every method walks to the target; more local steps only get there sooner."],
    ["2 Pulled apart", { curves: 0 },
      "Each client pulls to its own best point. Their valleys bend alike, so the pulls cancel in the mean, and all " +
      "still arrive."],
    ["3 Drift", {},
      "Now the valleys bend differently too. While they work alone, clients drift apart, and the pulls no longer " +
      "cancel: FedAvg and FedProx stop beside the target. SCAFFOLD does not."],
    ["4 More local work", { steps: 40 },
      "More local steps, more drift: FedAvg ends further off. SCAFFOLD still arrives, but slower: theory knows the " +
      "best number of steps."],
    ["5 Chance", { noise: 0.4 },
      "Noisy gradients keep every model moving. Theory knows the dotted ellipse it stays in: only SCAFFOLD's and " +
      "SGD's are around the target."],
    ["6 Break it", {},
      "SCAFFOLD lives by its memory. One client loses its own, once. Nothing crashes; the model just stops at the " +
      "wrong place, for good.", "lose"],
  ],
};
