"""PD-FTGL and PD-OCG: follow the leader over blocks, with tree noise and accelerated gossip (Wang et al., ICML 2025).

Rounds come in blocks of L, and a learner keeps its decision x for a block. In block z (from 0) it sums its data gradients at
x into a leaf, while it gossips the sum of the block before with its neighbours, in K steps::

    send      m^0 = d(z-1) + xi,  then  m^1, m^2, ...       (zeros in rounds without gossip)
    receive   m^k of every neighbour
    update    m^{k+1} = (1+theta) sum_j P_ij m_j^k - theta m^{k-1}
    at the end of the block
              prefix += m^K,   x = Proj( -prefix / (alpha z L + 2h) )

`xi` are the increments of a binary-tree counter's noise (`accounting`): the prefix of z leaves carries one noise for every
binary one of z. The loss's exact ridge is alpha, so a gradient without its alpha x is the data gradient.

The paper adds the counter's noise to m^K instead, inside every learner, and so sends m^0 without noise: `after_gossip`.

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
from sottovoce_core.arrays import Batch, FloatArray, Scalars, summarize_fields
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
from sottovoce_core.privacy.loss import Mechanism


@dataclass(frozen=True, slots=True)
class _State:
    """State of one learner, or many, before round t.

    Attributes:
        t: the round.
        scale: scale of the learner's noise.
        decision: x, constant in a block.
        next_decision: current point of conditional gradient on the way to the next decision.
        gradient: sum of this block's data gradients.
        current, previous: m^k and m^{k-1}; before gossip, `current` is the last block's sum.
        prefix: sum of the gossip results of all leaves, noise included.
        pending_noise: noise that is added to this block's leaf after its gossip.
        nodes: noise of the counter's open nodes.
    """

    t: int
    scale: Scalars
    decision: FloatArray
    next_decision: FloatArray
    gradient: FloatArray
    current: FloatArray
    previous: FloatArray
    prefix: FloatArray
    pending_noise: FloatArray
    nodes: OpenNodes


@dataclass(frozen=True, slots=True, eq=False)
class PdFtgl:
    """PD-FTGL of one run; with a `delay` of 3 it is PD-OCG."""

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
    """Weights `|Q_K|` of each learner's sum (column) in each learner's prefix (row)."""
    loss: Loss
    decision_set: DecisionSet

    __repr__ = summarize_fields

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        zero = np.zeros((*axes.leading_shape, self.dim))
        initial = zero + self.loss.initial_parameters(self.dim)
        first = self.decision_set.project(initial)
        # The regulariser is h ||x - x_0||^2 instead of h ||x||^2: a neural network cannot start from zero.
        prefix = -2.0 * self.regularization * initial
        return _State(0, axes.pick(self.scales), first, first, zero, zero, zero, prefix, zero, OpenNodes())

    # ---- messages ----------------------------------------------------------------------------------------------------

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        t, leaf = state.t, self.blocks.leaf(state.t)
        if not leaf:
            return state, Message({"y": np.zeros_like(state.decision)})
        if not self.blocks.is_block_start(t):
            return state, Message({"y": state.current})
        if not self._is_noisy:
            state = replace(state, previous=state.current)
        elif self.has_noise_before_gossip:
            message = add_laplace_noise(noise, "y", t, state.current, state.scale) - state.nodes.merged_noise(leaf)
            state = self._after_leaf_message(state, leaf, message)
        else:
            drawn = add_laplace_noise(noise, "y", t, np.zeros_like(state.current), state.scale)
            pending, nodes = drawn - state.nodes.merged_noise(leaf), state.nodes.add_leaf(leaf, drawn)
            state = replace(state, previous=state.current, pending_noise=pending, nodes=nodes)
        return state, Message({"y": state.current})

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        """Return the state after `message` and its log density, as `Algorithm.replay`.

        A message that depends on noise in no message is accepted with log density 0: with noise after gossip, a sum whose
        gradients were taken at a noisy decision (`leaf > delay`).
        """
        sent = np.broadcast_to(message["y"], state.decision.shape)
        leaf, opens = self.blocks.leaf(state.t), self.blocks.is_block_start(state.t)
        if not leaf:
            return state, dirac_log_density(sent, np.zeros_like(sent))
        if opens and self._is_noisy and self.has_noise_before_gossip:
            density = laplace_log_density(sent + state.nodes.merged_noise(leaf), state.current, state.scale)
            return self._after_leaf_message(state, leaf, sent), density
        is_undetermined = opens and self._is_noisy and leaf > self.delay
        density = dirac_log_density(sent, sent if is_undetermined else state.current)
        return replace(state, current=sent, previous=sent if opens else state.previous), density

    def _after_leaf_message(self, state: _State, leaf: int, message: FloatArray) -> _State:
        """Return the state after the first message of a leaf's gossip, with the noise that it implies for the leaf's node."""
        node = message + state.nodes.merged_noise(leaf) - round_to_lattice(state.current, lattice_spacing(state.scale))
        return replace(state, current=message, previous=message, nodes=state.nodes.add_leaf(leaf, node))

    @property
    def has_hidden_noise(self) -> bool:
        return self._is_noisy and not self.has_noise_before_gossip

    @property
    def _is_projection_free(self) -> bool:
        return self.delay == 3

    @property
    def _is_noisy(self) -> bool:
        return self.scales[0] > 0

    # ---- the update --------------------------------------------------------------------------------------------------

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        t, theta = state.t, self.momentum
        current, previous, next_decision = state.current, state.previous, state.next_decision
        gradient = mean_gradient(self.loss, state.decision, enforce_bounds(self.loss, batch))
        if self._is_projection_free:
            next_decision = self._step_conditional_gradient(state)
        if self.blocks.leaf(t):
            mixed = self.gossip.mix(current, received.weighted_sum("y"), received.own_weight)
            current, previous = (1.0 + theta) * mixed - theta * previous, current
        state = replace(
            state,
            t=t + 1,
            gradient=state.gradient + gradient,
            current=current,
            previous=previous,
            next_decision=next_decision,
        )
        return self._end_block(state) if self.blocks.is_block_end(t) else state

    def decision(self, state: _State) -> FloatArray:
        return state.decision

    def _end_block(self, state: _State) -> _State:
        """End a block: its gossip is complete, and its gradients become the next leaf."""
        block = (state.t - 1) // self.blocks.length
        prefix, decision = state.prefix, state.decision
        if 1 <= block <= self.blocks.leaves:
            prefix = prefix + self._leaf_sum(state)
            if not self._is_projection_free:
                decision = self.decision_set.project(prefix * (-1.0 / self._curvature(block)))
        if self._is_projection_free:
            decision = state.next_decision
        return replace(
            state,
            decision=decision,
            next_decision=decision,
            prefix=prefix,
            gradient=np.zeros_like(state.gradient),
            current=state.gradient,
        )

    def _leaf_sum(self, state: _State) -> FloatArray:
        """Return the sum for the counter. Noise added here is on a lattice, so the sum must be on it, too."""
        if self.has_noise_before_gossip or not self._is_noisy:
            return state.current
        return round_to_lattice(state.current, lattice_spacing(state.scale)) + state.pending_noise

    def _curvature(self, leaves: int) -> float:
        """Return the curvature of the objective of a decision from `leaves` leaves: `alpha L leaves + 2h`."""
        return self.loss.ridge * self.blocks.length * leaves + 2.0 * self.regularization

    def _step_conditional_gradient(self, state: _State) -> FloatArray:
        """Do one step of conditional gradient with exact line search, (9) and Algorithm 4."""
        leaves = state.t // self.blocks.length - 1
        if not 1 <= leaves <= self.blocks.leaves:
            return state.next_decision
        x, curvature = state.next_decision, self._curvature(leaves)
        slope = state.prefix + curvature * x
        direction = self.decision_set.minimise(slope) - x
        gain, bend = -np.vecdot(slope, direction), curvature * np.vecdot(direction, direction)
        step = np.clip(gain / np.maximum(bend, np.finfo(float).tiny), 0.0, 1.0)
        moved: FloatArray = x + step[..., None] * direction
        return moved

    # ---- accounting --------------------------------------------------------------------------------------------------

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        """Return the lattice of a leaf's first message, before gossip: later rounds mix it by weights."""
        return field_lattice_spacing("y", self.noise_scale(learner, t)) if self.blocks.is_block_start(t) else {}

    def noise_scale(self, learner: int, t: int) -> float:
        """Return the scale of the tree node whose noise a message carries; 0 without gossip, and with noise after gossip."""
        return self.scales[learner] if self.has_noise_before_gossip and self.blocks.leaf(t) else 0.0

    def is_model_public(self, rounds: int) -> bool:
        """Return whether decisions follow from messages: noise after gossip is in none of them."""
        return not self.has_hidden_noise

    def accountant(self, learner: int) -> TreeAccountant:
        output = None if self.has_noise_before_gossip else TreeAccountant(self.blocks, self._output_cost(learner))
        scale = self.scales[learner]
        # Theorem 3.6 solved for epsilon.
        paper = self.paper_cost / scale if scale else math.inf
        mechanism = Mechanism.laplace(self.dim)
        return TreeAccountant(self.blocks, self._wire_cost(learner), mechanism, self._basis(learner), paper, output)

    def _wire_cost(self, learner: int) -> TreeNodeCost:
        scale = self.scales[learner] if self.has_noise_before_gossip else 0.0
        return lambda share: self.sensitivity.node_privacy_loss(share, scale)

    def _output_cost(self, learner: int) -> TreeNodeCost:
        prefixes = list(zip(self.prefix_weights[:, learner].tolist(), self.scales, strict=True))
        return lambda share: math.fsum(
            self.sensitivity.node_privacy_loss(weight * share, scale) for weight, scale in prefixes
        )

    def _basis(self, learner: int) -> GuaranteeBasis:
        placement, scope = "after", "; of published decisions alone"
        if self.has_noise_before_gossip:
            placement, scope = "before", " and noise before gossip"
        proof = f"Wang et al. 2025, Theorem 3.6, with the exact sensitivity{scope}; docs/theory/pd-ftgl.md"
        return GuaranteeBasis(f"tree noise, {placement} gossip", proof, self._constants(learner))

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
