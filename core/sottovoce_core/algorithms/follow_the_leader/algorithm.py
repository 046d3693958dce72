"""PD-FTGL and PD-OCG: follow the leader over blocks, with tree noise and accelerated gossip (Wang et al., ICML 2025).

Rounds come in blocks of L, and a learner's decision x holds for a block. In block z (from 0) it sums its data gradients at
x into a leaf, while its neighbours and it gossip the sum of the block before, in K steps::

    say       m^0 = d(z-1) + xi,  then  m^1, m^2, ...       (zeros where there is nothing to gossip)
    hear      m^k of every neighbour
    update    m^{k+1} = (1+theta) sum_j P_ij m_j^k - theta m^{k-1}
    at the end of the block
              prefix += m^K,   x = Proj( -prefix / (alpha z L + 2h) )

`xi` are the increments of a binary-tree counter's noise (`tree`): the prefix of z leaves carries one noise for every binary
one of z. The loss's exact ridge is alpha, so a gradient without its alpha x is the data gradient.

The paper adds the counter's noise to m^K instead, inside every learner, and so says m^0 without any: `after_gossip`.

PD-OCG approaches the same minimiser of `<prefix, x> + (alpha z L + 2h)/2 ||x||^2` by conditional gradient, one step a round,
with linear minimisation instead of projection; it is one block later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.algorithms.follow_the_leader.accounting import (
    BlockSchedule,
    LeafSensitivity,
    OpenNodes,
    TreeAccountant,
    TreeNodeCost,
)
from sottovoce_core.algorithms.follow_the_leader.gossip import Gossip
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, Scalars
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.losses import Loss, enforce_bounds, mean_gradient
from sottovoce_core.noise import NoiseSource, lattice_spacing, round_to_lattice
from sottovoce_core.noise.mechanisms import (
    add_laplace_noise,
    dirac_log_density,
    field_lattice_spacing,
    laplace_log_density,
)
from sottovoce_core.privacy.guarantee import Constant, GuaranteeBasis


@dataclass(frozen=True, slots=True)
class _State:
    """One learner, or many, before round t.

    Attributes:
        t: the round.
        scale: of the learner's noise.
        decision: x, held for the block.
        ahead: where conditional gradient has come on its way to the next decision.
        gradient: sum of this block's data gradients.
        current, previous: m^k and m^{k-1}; the first is the last block's sum until its gossip begins.
        prefix: sum of what gossip made of all leaves, noise included.
        held: noise that is added to this block's leaf after its gossip.
        nodes: noise of the counter's open nodes.
    """

    t: int
    scale: Scalars
    decision: FloatArray
    ahead: FloatArray
    gradient: FloatArray
    current: FloatArray
    previous: FloatArray
    prefix: FloatArray
    held: FloatArray
    nodes: OpenNodes


@dataclass(frozen=True, slots=True, eq=False)
class PdFtgl:
    """The algorithm for one run; with a `delay` of 3 it is PD-OCG."""

    name: str
    dim: int
    blocks: BlockSchedule
    gossip: Gossip
    momentum: float
    regularization: float
    scales: tuple[float, ...]
    has_noise_before_gossip: bool
    delay: int
    paper_cost: float
    """Epsilon times Laplace scale in the paper's Theorem 3.6."""
    sensitivity: LeafSensitivity
    prefix_weights: FloatArray
    """`|Q_K|`: how strongly each learner's sum (column) enters each one's prefix (row)."""
    loss: Loss
    decision_set: DecisionSet

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        zero = np.zeros((*axes.leading_shape, self.dim))
        initial = zero + self.loss.initial_parameters(self.dim)
        first = self.decision_set.project(initial)
        # A regulariser h ||x - x_0||^2 in place of h ||x||^2: a network of neurons cannot start from zero.
        prefix = -2.0 * self.regularization * initial
        return _State(0, axes.pick(self.scales), first, first, zero, zero, zero, prefix, zero, OpenNodes())

    # ---- what goes on the wire ---------------------------------------------------------------------------------------

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        t, leaf = state.t, self.blocks.leaf(state.t)
        if not leaf:
            return state, Message({"y": np.zeros_like(state.decision)})
        if not self.blocks.is_block_start(t):
            return state, Message({"y": state.current})
        if not self._noisy:
            state = replace(state, previous=state.current)
        elif self.has_noise_before_gossip:
            said = add_laplace_noise(noise, "y", t, state.current, state.scale) - state.nodes.merged_noise(leaf)
            state = self._having_said(state, leaf, said)
        else:
            drawn = add_laplace_noise(noise, "y", t, np.zeros_like(state.current), state.scale)
            held, nodes = drawn - state.nodes.merged_noise(leaf), state.nodes.add_leaf(leaf, drawn)
            state = replace(state, previous=state.current, held=held, nodes=nodes)
        return state, Message({"y": state.current})

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        """Replay. What follows from noise that no message shows is taken as said, with density 0.

        That is so after gossip only: a sum whose gradients were taken at a noisy decision (`leaf > delay`).
        """
        said = np.broadcast_to(message["y"], state.decision.shape)
        leaf, opens = self.blocks.leaf(state.t), self.blocks.is_block_start(state.t)
        if not leaf:
            return state, dirac_log_density(said, np.zeros_like(said))
        if opens and self._noisy and self.has_noise_before_gossip:
            density = laplace_log_density(said + state.nodes.merged_noise(leaf), state.current, state.scale)
            return self._having_said(state, leaf, said), density
        open_end = opens and self._noisy and leaf > self.delay
        density = dirac_log_density(said, said if open_end else state.current)
        return replace(state, current=said, previous=said if opens else state.previous), density

    def _having_said(self, state: _State, leaf: int, said: FloatArray) -> _State:
        """After the first message of a leaf's gossip, with the noise that it implies for the leaf's node."""
        node = said + state.nodes.merged_noise(leaf) - round_to_lattice(state.current, lattice_spacing(state.scale))
        return replace(state, current=said, previous=said, nodes=state.nodes.add_leaf(leaf, node))

    @property
    def has_hidden_noise(self) -> bool:
        return self._noisy and not self.has_noise_before_gossip

    @property
    def _projection_free(self) -> bool:
        return self.delay == 3

    @property
    def _noisy(self) -> bool:
        return self.scales[0] > 0

    # ---- the update --------------------------------------------------------------------------------------------------

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        t, theta = state.t, self.momentum
        current, previous, ahead = state.current, state.previous, state.ahead
        seen = mean_gradient(self.loss, state.decision, enforce_bounds(self.loss, batch))
        if self._projection_free:
            ahead = self._step_ahead(state)
        if self.blocks.leaf(t):
            mixed = self.gossip.mix(current, received.weighted_sum("y"), received.own_weight)
            current, previous = (1.0 + theta) * mixed - theta * previous, current
        state = replace(state, t=t + 1, gradient=state.gradient + seen, current=current, previous=previous, ahead=ahead)
        return self._close(state) if self.blocks.is_block_end(t) else state

    def decision(self, state: _State) -> FloatArray:
        return state.decision

    def _close(self, state: _State) -> _State:
        """The end of a block: its gossip is done, and its gradients are the next leaf."""
        block = (state.t - 1) // self.blocks.length
        prefix, decision = state.prefix, state.decision
        if 1 <= block <= self.blocks.leaves:
            prefix = prefix + self._leaf_sum(state)
            if not self._projection_free:
                decision = self.decision_set.project(prefix * (-1.0 / self._curvature(block)))
        if self._projection_free:
            decision = state.ahead
        return replace(
            state,
            decision=decision,
            ahead=decision,
            prefix=prefix,
            gradient=np.zeros_like(state.gradient),
            current=state.gradient,
        )

    def _leaf_sum(self, state: _State) -> FloatArray:
        """What the counter takes in. Noise that comes now is on a lattice, so the sum must be, too."""
        if self.has_noise_before_gossip or not self._noisy:
            return state.current
        return round_to_lattice(state.current, lattice_spacing(state.scale)) + state.held

    def _curvature(self, leaves: int) -> float:
        """Of what a decision that rests on so many leaves minimises: `alpha L leaves + 2h`."""
        return self.loss.ridge * self.blocks.length * leaves + 2.0 * self.regularization

    def _step_ahead(self, state: _State) -> FloatArray:
        """One step of conditional gradient with exact line search, (9) and Algorithm 4."""
        leaves = state.t // self.blocks.length - 1
        if not 1 <= leaves <= self.blocks.leaves:
            return state.ahead
        x, curvature = state.ahead, self._curvature(leaves)
        slope = state.prefix + curvature * x
        way = self.decision_set.minimise(slope) - x
        gain, bend = -np.vecdot(slope, way), curvature * np.vecdot(way, way)
        step = np.clip(gain / np.maximum(bend, np.finfo(float).tiny), 0.0, 1.0)
        moved: FloatArray = x + step[..., None] * way
        return moved

    # ---- what it costs -----------------------------------------------------------------------------------------------

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        """Where a leaf is first said, before gossip: later rounds mix it by weights."""
        return field_lattice_spacing("y", self.noise_scale(learner, t)) if self.blocks.is_block_start(t) else {}

    def noise_scale(self, learner: int, t: int) -> float:
        """Of the tree node whose noise a message carries; 0 in rounds without gossip, and always after gossip."""
        return self.scales[learner] if self.has_noise_before_gossip and self.blocks.leaf(t) else 0.0

    def is_model_public(self, rounds: int) -> bool:
        """A decision follows from what gossip made of messages; noise after gossip is in none of them."""
        return not self.has_hidden_noise

    def accountant(self, learner: int) -> TreeAccountant:
        published = None if self.has_noise_before_gossip else TreeAccountant(self.blocks, self._output_cost(learner))
        scale = self.scales[learner]
        # Theorem 3.6 solved for epsilon.
        paper = self.paper_cost / scale if scale else math.inf
        return TreeAccountant(self.blocks, self._wire_cost(learner), self._grounds(learner), paper, published)

    def _wire_cost(self, learner: int) -> TreeNodeCost:
        scale = self.scales[learner] if self.has_noise_before_gossip else 0.0
        return lambda share: self.sensitivity.node_privacy_loss(share, scale)

    def _output_cost(self, learner: int) -> TreeNodeCost:
        ways = list(zip(self.prefix_weights[:, learner].tolist(), self.scales, strict=True))
        return lambda share: math.fsum(
            self.sensitivity.node_privacy_loss(weight * share, scale) for weight, scale in ways
        )

    def _grounds(self, learner: int) -> GuaranteeBasis:
        where, covers = "after", "; of published decisions alone"
        if self.has_noise_before_gossip:
            where, covers = "before", " and noise before gossip"
        proof = f"Wang et al. 2025, Theorem 3.6, with the exact sensitivity{covers}; sottovoce_core.algorithms.follow_the_leader"
        return GuaranteeBasis(f"tree noise, {where} gossip", proof, self._constants(learner))

    def _constants(self, learner: int) -> dict[str, Constant]:
        constants = {
            "gradient_change": Constant(
                self.sensitivity.gradient_change, "the loss, on rows scaled to feature_bound, and clipping"
            ),
            "noise_scale": Constant(
                self.scales[learner], "the learner, which draws one noise for each node of its tree"
            ),
            "levels": Constant(self.blocks.leaves.bit_length(), "the schedule of blocks, which is public"),
        }
        if not self.has_noise_before_gossip:
            reach = float(self.prefix_weights[:, learner].sum())
            constants["prefix_weight"] = Constant(
                reach, "all learners, where they gossip as agreed: nothing enforces it"
            )
        return constants
