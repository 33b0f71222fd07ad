//! Strategies: the criteria by which feasible workers are ranked.
//!
//! A chain ranks by its first strategy. Each further strategy decides between workers that the
//! earlier ones rank equal. Remaining ties are broken at random. Limits are not strategies: they
//! hold for any chain.

use std::fmt;
use std::str::FromStr;

use super::types::{Load, Purpose};

/// A criterion of ranking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Fewer bytes of inputs, image and caches to copy to the worker.
    VolumeLocality,
    /// Fewer containers on the worker, without those of checks.
    FewestBuildContainers,
    /// Fewer slots in use.
    LimitActiveTasks,
    /// Fewer containers on the worker.
    LimitActiveContainers,
    /// Fewer volumes on the worker.
    LimitActiveVolumes,
    /// No criterion: the choice is random.
    Random,
}

const NAMES: [(Strategy, &str); 6] = [
    (Strategy::VolumeLocality, "volume-locality"),
    (Strategy::FewestBuildContainers, "fewest-build-containers"),
    (Strategy::LimitActiveTasks, "limit-active-tasks"),
    (Strategy::LimitActiveContainers, "limit-active-containers"),
    (Strategy::LimitActiveVolumes, "limit-active-volumes"),
    (Strategy::Random, "random"),
];

/// Longest chain: each strategy once, except `random`, which compares nothing.
pub(crate) const LONGEST: usize = NAMES.len() - 1;

impl Strategy {
    /// Returns all strategies.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(strategy, _)| strategy)
    }

    pub(crate) fn name(self) -> &'static str {
        NAMES.iter().find(|(strategy, _)| *strategy == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Strategies in their order. The text form separates them with commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain(Vec<Strategy>);

/// Reason why a text is not a chain of strategies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseChainError {
    /// The strategy is unknown.
    #[error("unknown placement strategy {0:?}: choose from {all}", all = NAMES.map(|(_, name)| name).join(", "))]
    Unknown(String),
    /// The strategy is named twice.
    #[error("strategy {0} is named twice")]
    Twice(Strategy),
    /// A strategy follows `random`, so it would never be used.
    #[error("no strategy may follow random, which must be the last")]
    AfterRandom,
}

impl FromStr for Chain {
    type Err = ParseChainError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut chain = Vec::new();
        for word in text.split(',') {
            let known = NAMES.iter().find(|(_, name)| *name == word.trim());
            let (strategy, _) = known.ok_or_else(|| ParseChainError::Unknown(word.trim().to_owned()))?;
            if chain.contains(&Strategy::Random) {
                return Err(ParseChainError::AfterRandom);
            }
            if chain.contains(strategy) {
                return Err(ParseChainError::Twice(*strategy));
            }
            chain.push(*strategy);
        }
        Ok(Self(chain))
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&names.join(","))
    }
}

/// The chains of the purposes. `Purpose::of` selects one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chains {
    /// Requests with inputs.
    pub builds: Chain,
    /// Requests without inputs.
    pub without_inputs: Chain,
    /// Checks.
    pub checks: Chain,
}

impl Default for Chains {
    fn default() -> Self {
        let by_load = Chain(vec![Strategy::LimitActiveTasks]);
        Self {
            builds: Chain(vec![Strategy::VolumeLocality, Strategy::LimitActiveTasks]),
            without_inputs: by_load.clone(),
            checks: by_load,
        }
    }
}

impl Chains {
    /// Returns each chain, in the order of [`Purpose`].
    pub(crate) fn all(&self) -> [&Chain; 3] {
        [Purpose::Build, Purpose::WithoutInputs, Purpose::Check].map(|purpose| self.of(purpose))
    }

    pub(crate) fn of(&self, purpose: Purpose) -> &Chain {
        match purpose {
            Purpose::Build => &self.builds,
            Purpose::WithoutInputs => &self.without_inputs,
            Purpose::Check => &self.checks,
        }
    }
}

/// The values of a chain's strategies, in their order. Lower is better, and earlier values decide
/// first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Cost([u64; LONGEST]);

impl Chain {
    /// Returns the cost of a worker with `load` to which `bytes_to_move` must be copied.
    pub(crate) fn cost(&self, load: &Load, bytes_to_move: u64) -> Cost {
        let mut cost = Cost::default();
        for (counted, strategy) in cost.0.iter_mut().zip(&self.0) {
            *counted = match strategy {
                Strategy::VolumeLocality => bytes_to_move,
                Strategy::FewestBuildContainers => load.build_containers(),
                Strategy::LimitActiveTasks => u64::from(load.tasks),
                Strategy::LimitActiveContainers => load.containers(),
                Strategy::LimitActiveVolumes => load.volumes(),
                Strategy::Random => 0,
            };
        }
        cost
    }

    /// Returns whether the chain considers the location of bytes.
    pub(crate) fn is_by_locality(&self) -> bool {
        self.0.contains(&Strategy::VolumeLocality)
    }

    /// Returns the first strategy with different values.
    pub(crate) fn difference(&self, one: Cost, other: Cost) -> Option<Strategy> {
        let mut counted = self.0.iter().zip(one.0.iter().zip(other.0));
        counted.find(|(_, (one, other))| **one != *other).map(|(strategy, _)| *strategy)
    }

    /// Returns the value of each strategy except `random`.
    pub(crate) fn counts(&self, cost: Cost) -> impl Iterator<Item = (Strategy, u64)> {
        let strategies = self.0.iter().copied().filter(|strategy| *strategy != Strategy::Random);
        strategies.zip(cost.0)
    }

    /// Describes a cost for people.
    pub(crate) fn words(&self, cost: Cost) -> String {
        let words = self.counts(cost).map(|(strategy, count)| {
            let s = if count == 1 { "" } else { "s" };
            match strategy {
                Strategy::VolumeLocality => format!("{count} byte{s} to move"),
                Strategy::FewestBuildContainers => format!("{count} container{s} of builds"),
                Strategy::LimitActiveTasks => format!("{count} active task{s}"),
                Strategy::LimitActiveContainers => format!("{count} container{s}"),
                Strategy::LimitActiveVolumes => format!("{count} volume{s}"),
                Strategy::Random => String::new(),
            }
        });
        let words: Vec<_> = words.collect();
        if words.is_empty() { "chosen at random".to_owned() } else { words.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Kind;

    #[test]
    fn chain_is_parsed_from_its_text() {
        let chain: Chain = "volume-locality, fewest-build-containers,random".parse().expect("a chain");
        assert_eq!(chain.to_string(), "volume-locality,fewest-build-containers,random");
        let refused = |text: &str| text.parse::<Chain>().expect_err("no chain").to_string();
        assert!(
            refused("spread")
                .contains("unknown placement strategy \"spread\": choose from volume-locality, ")
        );
        assert!(refused("").contains("\"\""));
        assert_eq!(
            refused("random,limit-active-tasks"),
            "no strategy may follow random, which must be the last"
        );
        assert_eq!(
            refused("limit-active-tasks,limit-active-tasks"),
            "strategy limit-active-tasks is named twice"
        );
    }

    #[test]
    fn purpose_depends_on_kind_and_inputs() {
        for kind in Kind::ALL {
            let expected = match kind {
                Kind::Check => [Purpose::Check, Purpose::Check],
                _ => [Purpose::Build, Purpose::WithoutInputs],
            };
            assert_eq!([true, false].map(|has_inputs| Purpose::of(kind, has_inputs)), expected, "{kind:?}");
        }
        let chains = Chains {
            builds: "volume-locality".parse().expect("a chain"),
            without_inputs: "limit-active-tasks".parse().expect("a chain"),
            checks: "random".parse().expect("a chain"),
        };
        let names =
            [Purpose::Build, Purpose::WithoutInputs, Purpose::Check].map(|of| chains.of(of).to_string());
        assert_eq!(names, ["volume-locality", "limit-active-tasks", "random"]);
    }

    #[test]
    fn strategies_count_their_resource() {
        let load = Load { tasks: 3, checks: 1, kept_containers: 10, kept_volumes: 20, ..Load::default() };
        let cost = |chain: &str| chain.parse::<Chain>().expect("a chain").cost(&load, 7).0[0];
        assert_eq!(cost("volume-locality"), 7);
        assert_eq!(cost("fewest-build-containers"), 12);
        assert_eq!(cost("limit-active-tasks"), 3);
        assert_eq!(cost("limit-active-containers"), 13);
        assert_eq!(cost("limit-active-volumes"), 23);
        assert_eq!(cost("random"), 0);
    }
}
