//! What comes to own outputs, as callers tell the scheduler, and the scheduler the artifact store.

use std::collections::HashSet;

use domain::workload::OutputOwner;
use tonic::Status;

use crate::pb::{artifacts, scheduler};
use crate::{invalid_field, parse_id, required};

/// Most owners of an output.
const MOST: usize = 100;

macro_rules! both_packages {
    ($($package:ident, $parse:ident, $on_wire:ident;)+) => {$(
        /// What comes to own one output. `caches`: those that own another one.
        pub fn $parse(
            field: &str,
            owners: Vec<$package::OutputOwner>,
            caches: &mut HashSet<OutputOwner>,
        ) -> Result<Vec<OutputOwner>, Status> {
            use $package::output_owner::Owner;
            if owners.len() > MOST {
                return Err(invalid_field(field, format!("must be at most {MOST}")));
            }
            let parse = |owner: $package::OutputOwner| {
                let owner = match required(&format!("{field}.owner"), owner.owner)? {
                    Owner::BuildId(id) => OutputOwner::Build(parse_id(&format!("{field}.build_id"), &id)?),
                    Owner::TaskCacheId(id) => {
                        OutputOwner::TaskCache(parse_id(&format!("{field}.task_cache_id"), &id)?)
                    }
                    Owner::ResourceCacheClaimId(id) => OutputOwner::ResourceCache(parse_id(
                        &format!("{field}.resource_cache_claim_id"),
                        &id,
                    )?),
                };
                if owner.is_cache() && !caches.insert(owner) {
                    return Err(invalid_field(field, "a cache must be named once"));
                }
                Ok(owner)
            };
            owners.into_iter().map(parse).collect()
        }

        /// What comes to own an output, on the wire.
        #[must_use]
        pub fn $on_wire(owner: OutputOwner) -> $package::OutputOwner {
            use $package::output_owner::Owner;
            let owner = match owner {
                OutputOwner::Build(build) => Owner::BuildId(build.to_string()),
                OutputOwner::TaskCache(cache) => Owner::TaskCacheId(cache.to_string()),
                OutputOwner::ResourceCache(claim) => Owner::ResourceCacheClaimId(claim.to_string()),
            };
            $package::OutputOwner { owner: Some(owner) }
        }
    )+};
}

both_packages! {
    artifacts, parse_settled, settled;
    scheduler, parse_submitted, submitted;
}

#[cfg(test)]
mod tests {
    use domain::{BuildId, CacheId, ClaimId};

    use super::*;

    #[test]
    fn owners_come_back_from_the_wire_and_a_cache_owns_one_output() {
        let (build, cache, claim) = (BuildId::new(), CacheId::new(), ClaimId::new());
        let owners =
            [OutputOwner::Build(build), OutputOwner::TaskCache(cache), OutputOwner::ResourceCache(claim)];
        let mut caches = HashSet::new();
        let mut parse = |owners: &[OutputOwner]| {
            parse_submitted("owners", owners.iter().copied().map(submitted).collect(), &mut caches)
        };
        assert_eq!(parse(&owners).expect("they are fine"), owners);
        assert_eq!(parse(&owners[..1]).expect("a build may own several"), owners[..1]);
        parse(&owners[1..2]).expect_err("it is named twice");
        parse(&[owners[0]; 101]).expect_err("they are too many");
        let none = vec![artifacts::OutputOwner { owner: None }];
        parse_settled("owners", none, &mut HashSet::new()).expect_err("it says not which");
        let malformed = artifacts::output_owner::Owner::TaskCacheId("x".to_owned());
        let malformed = vec![artifacts::OutputOwner { owner: Some(malformed) }];
        parse_settled("owners", malformed, &mut HashSet::new()).expect_err("it is no id");
    }
}
