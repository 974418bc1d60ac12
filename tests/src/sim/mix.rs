//! Draws the mix of requests of an epoch.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use ronde_wire::{Codec, DType, Group, Pair, Rank, ReduceOp, SetId, TensorName, World, set_of_members_name};

use super::fake_plugins::FakePlugin;
use super::item::{ANY_SOURCE_TAGS, Difference, Excuse, InjectedError, Item, Kind, NO_SET, SetOf, differences};
use super::saboteur::Saboteur;
use super::workload::{Loops, Recipe};
use crate::PAIRWISE;

/// An epoch's items while they are drawn.
pub(super) struct Mix<'a> {
    rng: &'a mut Rng,
    recipe: &'a Recipe,
    world: &'a World,
    items: Vec<Item>,
    /// Names used in each set: the same ones in all of them.
    names: BTreeMap<SetOf, usize>,
    /// Ranks of all sets that exist at some time, so that none is added twice.
    sets: BTreeSet<Vec<Rank>>,
    /// Ranks of the sets that are formed by their members.
    formed: BTreeSet<Vec<Rank>>,
    /// Items that are followed by another one of the same name.
    followed: BTreeSet<usize>,
    /// For each set, the item that all its ranks wait for at this point: that all have joined.
    base: BTreeMap<SetOf, usize>,
    groups: u32,
}

impl<'a> Mix<'a> {
    pub(super) fn new(rng: &'a mut Rng, recipe: &'a Recipe, world: &'a World) -> Self {
        let (items, names, formed, followed, base) = Default::default();
        let sets = world.sets().iter().map(|set| set.ranks.clone()).collect();
        Self { rng, recipe, world, items, names, sets, formed, followed, base, groups: 0 }
    }

    pub(super) fn items(mut self) -> Vec<Item> {
        if self.recipe.loops != Loops::Only {
            self.some();
        }
        if self.recipe.loops != Loops::None {
            self.repeat();
        }
        let joins_one_in = if self.favours(Saboteur::JoinedGarbage) { 1 } else { 4 };
        while self.rng.u8(..joins_one_in) == 0 && self.items.len() < ITEMS_MAX {
            self.join_anywhere();
            self.some();
        }
        self.items
    }

    fn some(&mut self) {
        let most = [3, 12, 40][self.rng.usize(..3)];
        for _ in 0..self.rng.usize(1..=most) {
            match self.rng.u8(..20) {
                0 => self.group(),
                1 => self.messages(),
                2 => self.passing_set(),
                8.. if self.favours(Saboteur::ReleasedTwice) => self.group(),
                8.. if self.favours(Saboteur::CrossedMessages) => self.messages(),
                8.. if self.favours(Saboteur::EarlyRemoval) => self.passing_set(),
                3 if self.recipe.injected => self.nonsense(),
                4..8 => self.follow(),
                8 if self.recipe.saboteur.is_none() => self.formed_set(),
                _ => {
                    let set = self.any_set();
                    self.single(set, None);
                }
            }
        }
    }

    /// The same step repeatedly, as in training; sometimes a step differs.
    fn repeat(&mut self) {
        let sabotaged = self.recipe.saboteur.is_some();
        let (tensors, steps) = (self.rng.usize(1..=5), self.rng.usize(4..=20) + if sabotaged { 20 } else { 0 });
        let grouped = self.rng.u8(..4) == 0;
        let step: Vec<Item> = (0..tensors).map(|at| self.repeated(at == 0, grouped.then_some(tensors))).collect();
        let mut before: Vec<usize> = Vec::new();
        for _ in 0..steps {
            let mut indices = Vec::new();
            for (at, item) in step.iter().enumerate() {
                let (turn, salt) = (Some(self.items.len()), self.rng.u64(..));
                let mut item =
                    Item { turn, salt, after: before.get(at).copied().into_iter().collect(), ..item.clone() };
                if self.rng.u8(..48) == 0 {
                    item.injected = self.injected(&item);
                }
                indices.push(self.push(item));
                if self.rng.u8(..if sabotaged { 16 } else { 48 }) == 0 {
                    let set = self.any_set();
                    let between = self.single(set, None);
                    self.items[between].turn = Some(between);
                }
            }
            before = indices;
        }
    }

    /// An item of every step; in one group with others, or for itself. The first one keeps all ranks together.
    fn repeated(&mut self, first: bool, group: Option<usize>) -> Item {
        let world = (SetOf::Fixed(SetId::WORLD), self.world.sets()[0].ranks.clone());
        let (place, ranks) = if first || self.rng.bool() || group.is_some() { world } else { self.any_set() };
        let kind = match self.rng.u8(..16) {
            _ if group.is_some() => Kind::AllReduce(ReduceOp::Sum),
            0 => Kind::AllGather,
            1 => Kind::AllToAll,
            2 => Kind::ReduceScatter(ReduceOp::Sum),
            3 if self.recipe.saboteur.is_none() => self.kind(&ranks),
            _ => Kind::AllReduce(ReduceOp::Sum),
        };
        let mut item = self.draw(place, ranks.clone(), kind.clone());
        for _ in 0..8 {
            let empty = item.rows.contains(&0) || item.splits.iter().flatten().any(|rows| *rows == 0);
            if !empty {
                break;
            }
            let (name, again) = (item.name, self.draw(place, ranks.clone(), kind.clone()));
            item = Item { name, ..again };
        }
        if let Some(tensors) = group {
            let name = TensorName::new("group.again").expect("a short name");
            let size = u32::try_from(tensors).expect("few tensors");
            let like = self.items.iter().find(|other| other.group.as_ref().is_some_and(|group| group.name == name));
            item.dtype = like.map_or(item.dtype, |like| like.dtype);
            item.group = Some(Group { name, size });
        }
        item
    }

    fn favours(&self, saboteur: Saboteur) -> bool {
        self.recipe.saboteur == Some(saboteur)
    }

    fn any_set(&mut self) -> (SetOf, Vec<Rank>) {
        let sets = self.world.sets();
        let set = &sets[self.rng.usize(..sets.len())];
        (SetOf::Fixed(set.id), set.ranks.clone())
    }

    fn single(&mut self, (place, ranks): (SetOf, Vec<Rank>), kind: Option<Kind>) -> usize {
        let kind = kind.unwrap_or_else(|| self.kind(&ranks));
        let mut item = self.draw(place, ranks, kind);
        item.injected = self.injected(&item);
        self.push(item)
    }

    /// An item with the name of an earlier one, as soon as a rank has its answer to that; often exactly the same
    /// request.
    fn follow(&mut self) {
        let (place, ranks) = self.any_set();
        let free = |index: &usize| {
            let item = &self.items[*index];
            let plain = item.is_performed() && !matches!(item.kind, Kind::Message(..));
            let free = !self.followed.contains(index) && item.turn.is_none();
            item.place == place && item.ranks == ranks && plain && free
        };
        let Some(earlier) = (0..self.items.len()).rev().find(free) else {
            self.single((place, ranks), None);
            return;
        };
        self.followed.insert(earlier);
        let old = self.items[earlier].clone();
        let alike = self.rng.bool() && old.injected == InjectedError::None;
        let mut item = if alike {
            let (after, asked_before, salt) = (Vec::new(), Vec::new(), self.rng.u64(..));
            Item { salt, askers: ranks, excuse: None, group: None, after, asked_before, turn: None, ..old.clone() }
        } else {
            let kind = self.kind(&ranks);
            let item = self.draw(place, ranks, kind);
            Item { injected: self.injected(&item), ..item }
        };
        item.name = old.name;
        item.after.push(earlier);
        self.push(item);
    }

    /// Tensors that are ordered together; some are rejected.
    fn group(&mut self) {
        let (place, ranks) = self.any_set();
        let kind = match self.kind(&ranks) {
            Kind::Barrier => Kind::AllReduce(ReduceOp::Sum),
            other => other,
        };
        let size = self.rng.u32(1..=5);
        self.groups += 1;
        let name = TensorName::new(format!("group.{}", self.groups)).expect("a short name");
        for _ in 0..size {
            let mut item = self.draw(place, ranks.clone(), kind.clone());
            item.group = Some(Group { name: name.clone(), size });
            item.injected = self.injected(&item);
            self.push(item);
        }
    }

    /// Several messages between two ranks, in any order.
    fn messages(&mut self) {
        let (place, ranks) = self.any_set();
        if ranks.len() < 2 {
            return;
        }
        let first = self.rng.usize(..ranks.len());
        let second = (first + self.rng.usize(1..ranks.len())) % ranks.len();
        let pair = Pair { from: ranks[first], to: ranks[second] };
        if !self.favours(Saboteur::CrossedMessages) && self.rng.u8(..4) == 0 {
            self.message_from_any((place, ranks), pair);
            return;
        }
        let turns = self.items.iter().filter(|item| item.place == place && is_between(item, pair)).count();
        for turn in turns..turns + self.rng.usize(1..=3) {
            let tag = self.rng.u32(..3);
            let mut item = self.draw(place, ranks.clone(), Kind::Message(pair, tag));
            let name = format!("message.{}.{}.{tag}.{turn}", pair.from.0, pair.to.0);
            item.name = TensorName::new(name).expect("a short name");
            item.askers = vec![pair.from.min(pair.to), pair.from.max(pair.to)];
            item.injected = self.injected(&item);
            self.push(item);
        }
    }

    /// A message that is received from any source. No other message uses its tag, so it is known which message that is.
    /// Senders are not notified of a refused or withdrawn receive, so neither has an injected error.
    fn message_from_any(&mut self, (place, ranks): (SetOf, Vec<Rank>), pair: Pair) {
        let tag = ANY_SOURCE_TAGS + u32::try_from(self.items.len()).expect("few items");
        let mut item = self.draw(place, ranks, Kind::Message(pair, tag));
        item.name = pair.message_name(tag, 0);
        item.askers = vec![pair.from.min(pair.to), pair.from.max(pair.to)];
        self.push(item);
    }

    /// A process set that is added, used and removed.
    fn passing_set(&mut self) {
        let world = self.world.sets()[0].ranks.clone();
        let mut ranks: Vec<Rank> = world.iter().copied().filter(|_| self.rng.bool()).collect();
        let known = !self.sets.insert(ranks.clone());
        if ranks.is_empty() || known && !self.recipe.injected {
            return;
        }
        let members = ranks.clone();
        self.rng.shuffle(&mut ranks);
        let mut adding = self.draw(SetOf::Fixed(SetId::WORLD), world.clone(), Kind::AddSet(ranks));
        let static_set = self.world.sets().iter().any(|set| set.ranks == members);
        adding.injected = match self.rng.u8(..8) {
            _ if static_set => InjectedError::Nonsense("duplicate process set"),
            _ if known => return,
            0 if self.recipe.injected && world.len() > 1 => {
                InjectedError::Mismatch(world[self.rng.usize(..world.len())], Difference::List)
            }
            1 if self.recipe.injected => InjectedError::Refused(world[self.rng.usize(..world.len())]),
            _ => InjectedError::None,
        };
        let fails = adding.must_fail();
        let added = self.push(adding);
        if fails {
            self.sets.remove(&members);
            return;
        }
        self.use_and_remove(added, &members, world);
    }

    fn use_and_remove(&mut self, added: usize, members: &[Rank], world: Vec<Rank>) {
        let place = SetOf::Added(added);
        let first = self.items.len();
        let mut used: Vec<usize> =
            (0..self.rng.usize(..6)).map(|_| self.single((place, members.to_vec()), None)).collect();
        let joins = self.rng.u8(..4) == 0;
        if joins {
            self.join((place, members.to_vec()));
            used = (first..self.items.len()).collect();
        }
        if self.rng.u8(..4) == 0 {
            return;
        }
        let mut removal = self.draw(SetOf::Fixed(SetId::WORLD), world, Kind::RemoveSet(Some(added)));
        removal.after.push(added);
        // A set is not removed while a rank has joined in it.
        if self.recipe.injected && !joins && self.rng.bool() {
            for index in &used {
                let item = &mut self.items[*index];
                item.excuse = Some(Excuse::Removed);
                if item.injected == InjectedError::None && item.askers.len() > 1 && self.rng.u8(..4) == 0 {
                    item.askers.remove(self.rng.usize(..item.askers.len()));
                    item.injected = InjectedError::Missing;
                }
            }
            removal.asked_before = used;
        } else {
            removal.after.extend(used);
        }
        self.push(removal);
    }

    /// A process set that its members form by themselves, or find.
    fn formed_set(&mut self) {
        let sets = self.world.sets();
        let mut members: Vec<Rank> = sets[0].ranks.iter().copied().filter(|_| self.rng.bool()).collect();
        if self.rng.u8(..3) == 0 {
            let found: Vec<&Vec<Rank>> = sets.iter().map(|set| &set.ranks).chain(&self.formed).collect();
            members.clone_from(found[self.rng.usize(..found.len())]);
        }
        let known = sets.iter().find(|set| set.ranks == members).map(|set| set.id);
        let added = self.sets.contains(&members) && known.is_none() && !self.formed.contains(&members);
        if members.is_empty() || added {
            // One that all ranks add and may remove at any time.
            return;
        }
        let first = known.is_none() && self.formed.insert(members.clone());
        self.sets.insert(members.clone());
        let mut ranks = members.clone();
        self.rng.shuffle(&mut ranks);
        let mut forming = self.draw(SetOf::Fixed(SetId::WORLD), members.clone(), Kind::FormSet(ranks, known));
        forming.name = self.name_of_members(&forming);
        let culprit = members[self.rng.usize(..members.len())];
        forming.injected = match self.rng.u8(..8) {
            _ if !self.recipe.injected || members.len() < 2 => InjectedError::None,
            0 if members.len() > 2 => InjectedError::Mismatch(culprit, Difference::List),
            1 => InjectedError::Refused(culprit),
            2 => InjectedError::Withdrawn(culprit),
            _ => InjectedError::None,
        };
        let certain = forming.injected == InjectedError::None;
        let formed = self.push(forming);
        if !certain || !first {
            return;
        }
        for _ in 0..self.rng.usize(..4) {
            self.single((SetOf::Added(formed), members.clone()), None);
        }
        if self.rng.u8(..4) == 0 {
            self.join((SetOf::Added(formed), members));
        }
    }

    /// One name for disjoint sets; otherwise each request has its own.
    fn name_of_members(&self, forming: &Item) -> TensorName {
        let name = |own: &str| set_of_members_name(own).expect("a short name");
        let shared = name("shared");
        let disjoint = |other: &&Item| other.name != shared || other.ranks.iter().all(|r| !forming.ranks.contains(r));
        if self.items.iter().all(|other| disjoint(&other)) { shared } else { name(forming.name.as_str()) }
    }

    /// Invalid requests of one rank or of all.
    fn nonsense(&mut self) {
        let (place, ranks) = self.any_set();
        let world = self.world.sets()[0].ranks.clone();
        let one = world[self.rng.usize(..world.len())];
        let sum = Kind::AllReduce(ReduceOp::Sum);
        let mut item = match self.rng.u8(..4) {
            0 => {
                let item = self.draw(SetOf::Fixed(NO_SET), vec![one], sum);
                Item { injected: InjectedError::Nonsense("Process set provided does not exist"), ..item }
            }
            1 if !ranks.contains(&one) => {
                let item = self.draw(place, vec![one], sum);
                Item { injected: InjectedError::Nonsense("is not a member of the provided process set"), ..item }
            }
            2 => {
                let item =
                    self.draw(SetOf::Fixed(SetId::WORLD), vec![one], Kind::Message(Pair { from: one, to: one }, 0));
                Item { injected: InjectedError::Nonsense("itself"), ..item }
            }
            3 => self.draw(SetOf::Fixed(SetId::WORLD), world, Kind::RemoveSet(None)),
            _ => return,
        };
        item.group = None;
        self.push(item);
    }

    /// A join in the set of all ranks or in another one.
    fn join_anywhere(&mut self) {
        let world = (SetOf::Fixed(SetId::WORLD), self.world.sets()[0].ranks.clone());
        let set = if self.favours(Saboteur::JoinedGarbage) || self.rng.bool() { world } else { self.any_set() };
        self.join(set);
    }

    /// Ranks of a set run out of work at different times; operations that they no longer submit are performed without
    /// them, or fail.
    fn join(&mut self, (place, ranks): (SetOf, Vec<Rank>)) {
        let count = self.rng.usize(..10);
        let stops: Vec<usize> = ranks.iter().map(|_| self.rng.usize(..=count)).collect();
        for turn in 0..count {
            let askers: Vec<Rank> =
                ranks.iter().zip(&stops).filter(|(_, stop)| **stop > turn).map(|(rank, _)| *rank).collect();
            if askers.is_empty() {
                break;
            }
            let other = ranks[self.rng.usize(..ranks.len())];
            let kind = match self.kind(&ranks) {
                Kind::Barrier if !askers.contains(&other) => Kind::Message(Pair { from: askers[0], to: other }, 7),
                other => other,
            };
            let mut item = self.draw(place, ranks.clone(), kind);
            if let Kind::Message(pair, tag) = item.kind {
                let name = format!("message.{}.{}.{tag}.{}", pair.from.0, pair.to.0, self.items.len());
                item.name = TensorName::new(name).expect("a short name");
            }
            let all = askers.len() == ranks.len();
            item.askers = if matches!(item.kind, Kind::Message(..)) { vec![askers[0]] } else { askers };
            item.injected = match item.supports_join() || all {
                true => self.injected(&item),
                false if self.recipe.injected => InjectedError::Joined,
                false => continue,
            };
            self.push(item);
        }
        let joined = self.joining(place, &ranks, None);
        let fails = self.items[joined].injected != InjectedError::None;
        let joined = if fails { self.joining(place, &ranks, Some(joined)) } else { joined };
        self.base.insert(place, joined);
    }

    /// All ranks of a set join, each of them when it has submitted everything else there. When that may fail they try
    /// again.
    fn joining(&mut self, place: SetOf, ranks: &[Rank], failed: Option<usize>) -> usize {
        let mut joining = self.draw(place, ranks.to_vec(), Kind::Join);
        let culprit = ranks[self.rng.usize(..ranks.len())];
        joining.injected = match self.rng.u8(..6) {
            _ if !self.recipe.injected || failed.is_some() => InjectedError::None,
            0 => InjectedError::Refused(culprit),
            1 => InjectedError::Withdrawn(culprit),
            _ => InjectedError::None,
        };
        joining.after.extend(failed);
        for (index, item) in self.items.iter_mut().enumerate().filter(|(_, item)| item.place == place) {
            joining.asked_before.push(index);
            if matches!(item.kind, Kind::Message(_, ANY_SOURCE_TAGS..)) {
                // A join is refused while such a receive waits.
                joining.after.push(index);
            }
            if joining.injected != InjectedError::None && item.askers.len() < item.ranks.len() && item.supports_join() {
                item.excuse = Some(Excuse::JoinFails);
            }
        }
        self.push(joining)
    }

    fn push(&mut self, mut item: Item) -> usize {
        item.after.extend(self.base.get(&item.place));
        if let SetOf::Added(adding) = item.place {
            item.after.push(adding);
        }
        item.too_large = item.is_performed() && item.result_bytes() > self.recipe.result_bytes_max;
        self.items.push(item);
        self.items.len() - 1
    }

    fn injected(&mut self, item: &Item) -> InjectedError {
        let culprit = item.askers[self.rng.usize(..item.askers.len())];
        if !self.recipe.injected || item.askers.len() < 2 {
            return InjectedError::None;
        }
        let differences = differences(item);
        let message = matches!(item.kind, Kind::Message(..));
        match self.rng.u8(..32) {
            0 | 1 if !differences.is_empty() => {
                InjectedError::Mismatch(culprit, differences[self.rng.usize(..differences.len())])
            }
            2 | 3 => InjectedError::Refused(culprit),
            4 if !message => InjectedError::Absurd(culprit),
            5 | 6 => InjectedError::Withdrawn(culprit),
            _ => InjectedError::None,
        }
    }

    fn kind(&mut self, ranks: &[Rank]) -> Kind {
        let member = ranks[self.rng.usize(..ranks.len())];
        let op = PAIRWISE[self.rng.usize(..PAIRWISE.len())];
        match self.rng.u8(..24) {
            0 => Kind::Barrier,
            1 => Kind::Broadcast(member),
            2 => Kind::AllGather,
            3 => Kind::ReduceScatter(op),
            4 => Kind::AllToAll,
            5 => Kind::Reduce(op, member),
            6 => Kind::Gather(member),
            7 => Kind::Scatter(member),
            8 => Kind::AllReduce(ReduceOp::Median),
            9 => Kind::AllReduce(ReduceOp::ClippedMean),
            10 => Kind::AllReduce(ReduceOp::Adasum),
            11..15 => Kind::AllReduce(op),
            // Most tensors are alike, so that some can be fused.
            _ => Kind::AllReduce(ReduceOp::Sum),
        }
    }

    /// Now and then a plugin encodes or reduces. Other planted bugs are searched for without plugins.
    fn fake_plugin(&mut self, kind: Kind) -> (Kind, Option<FakePlugin>) {
        let Kind::AllReduce(op) = kind else { return (kind, None) };
        let one_in = match self.recipe.saboteur {
            None => 8,
            Some(saboteur) if saboteur.commits() => 1,
            Some(_) => return (kind, None),
        };
        if self.rng.u8(..one_in) != 0 {
            return (kind, None);
        }
        if matches!(op, ReduceOp::Sum | ReduceOp::Average) && self.rng.bool() {
            return (kind, Some(FakePlugin::Codec));
        }
        let reducer = FakePlugin::REDUCERS[self.rng.usize(..FakePlugin::REDUCERS.len())];
        (Kind::AllReduce(ReduceOp::Plugin), Some(reducer))
    }

    fn draw(&mut self, place: SetOf, ranks: Vec<Rank>, kind: Kind) -> Item {
        let (kind, plugin) = self.fake_plugin(kind);
        let reduction = match kind {
            Kind::AllReduce(op) | Kind::ReduceScatter(op) | Kind::Reduce(op, _) => Some(op),
            _ => None,
        };
        let nary = matches!(reduction, Some(ReduceOp::Median | ReduceOp::ClippedMean | ReduceOp::Adasum));
        let bitwise = reduction.is_some_and(ReduceOp::is_bitwise);
        let floats = [DType::F32, DType::F16, DType::Bf16, DType::F64][self.rng.usize(..4)];
        let dtype = match DType::ALL[self.rng.usize(..DType::ALL.len())] {
            _ if bitwise => [DType::U8, DType::I16, DType::I64, DType::Bool][self.rng.usize(..4)],
            _ if nary || self.recipe.any_floats || plugin.is_some_and(FakePlugin::wants_floats) => floats,
            DType::Bool if reduction == Some(ReduceOp::Average) => DType::F32,
            other if self.rng.u8(..3) == 0 => other,
            _ => DType::F32,
        };
        let plain_sum = matches!(kind, Kind::AllReduce(ReduceOp::Sum | ReduceOp::Average)) && dtype == DType::F32;
        let codec = match self.rng.u8(..6) {
            _ if plugin.is_some() => {
                plugin.filter(|of| *of == FakePlugin::Codec).map_or(Codec::None, |_| Codec::Plugin)
            }
            0.. if plain_sum && self.favours(Saboteur::UnroundedOwner) => Codec::F16,
            0 if plain_sum => Codec::F16,
            1 if plain_sum => Codec::Bf16,
            _ => Codec::None,
        };
        let scaled = reduction == Some(ReduceOp::Sum) && dtype == DType::F32 && self.rng.u8(..4) == 0;
        let scales = if scaled { (2.0, 0.5) } else { (1.0, 1.0) };
        let count = self.names.entry(place).or_default();
        *count += 1;
        let name = TensorName::new(format!("tensor.{count}")).expect("a short name");
        let (dimensions, columns, rows, splits) = self.extent(&kind, ranks.len());
        let (injected, excuse, group, too_large) = (InjectedError::None, None, None, false);
        let may_fail = plugin.is_some() && self.recipe.injected;
        let (after, asked_before, turn, salt) = (Vec::new(), Vec::new(), None, self.rng.u64(..));
        let askers = ranks.clone();
        #[rustfmt::skip]
        let item = Item { place, ranks, askers, name, kind, dtype, codec, plugin, may_fail, group, dimensions, columns, rows, splits, scales, injected, excuse, too_large, after, asked_before, turn, salt };
        item
    }

    /// Dimensions, elements of a row, rows of each rank, and rows from each rank to each.
    fn extent(&mut self, kind: &Kind, ranks: usize) -> (usize, u64, Vec<u64>, Vec<Vec<u64>>) {
        // Now and then a tensor of a megabyte, which travels in many chunks.
        let (columns, most) = match self.rng.u8(..40) {
            0 => (900, 400),
            _ => ([1, 1, 3, 40, 900][self.rng.usize(..5)], 8),
        };
        let dimensions = if columns == 1 && self.rng.bool() { 1 } else { 2 };
        let mut splits = Vec::new();
        let rows: Vec<u64> = match kind {
            Kind::AllGather | Kind::Gather(_) => (0..ranks).map(|_| self.rng.u64(..=most)).collect(),
            Kind::AllToAll => {
                let most = if self.rng.bool() { most.div_ceil(ranks as u64) } else { 2 };
                splits = (0..ranks).map(|_| (0..ranks).map(|_| self.rng.u64(..=most)).collect()).collect();
                splits.iter().map(|splits: &Vec<u64>| splits.iter().sum()).collect()
            }
            Kind::Barrier | Kind::Join | Kind::AddSet(_) | Kind::FormSet(..) | Kind::RemoveSet(_) => vec![0; ranks],
            _ => vec![self.rng.u64(..=most); ranks],
        };
        let scalar = matches!(kind, Kind::AllReduce(_) | Kind::Broadcast(_) | Kind::Reduce(..) | Kind::Message(..));
        if scalar && columns == 1 && rows[0] == 1 {
            return (0, columns, rows, splits);
        }
        (dimensions, columns, rows, splits)
    }
}

/// No epoch has many more items.
const ITEMS_MAX: usize = 100;

fn is_between(item: &Item, pair: Pair) -> bool {
    matches!(item.kind, Kind::Message(other, _) if other == pair)
}
