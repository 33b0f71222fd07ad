//! Owners of outputs in requests to the scheduler and to the artifact store.

use std::collections::HashSet;

use domain::workload::OutputOwner;
use tonic::Status;

use crate::pb::{artifacts, scheduler};
use crate::{invalid_field, parse_id, required};

/// Maximum number of owners of an output.
const MOST: usize = 100;

macro_rules! both_packages {
    ($($package:ident, $parse:ident, $on_wire:ident;)+) => {$(
        /// Parses the owners of one output. `caches` collects the caches of all outputs, because a
        /// cache may own only one output.
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
                    return Err(invalid_field(field, "must name each cache only once"));
                }
                Ok(owner)
            };
            owners.into_iter().map(parse).collect()
        }

        /// Converts an owner to its protobuf form.
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
    fn cache_owns_only_one_output() {
        let (build, cache, claim) = (BuildId::new(), CacheId::new(), ClaimId::new());
        let owners =
            [OutputOwner::Build(build), OutputOwner::TaskCache(cache), OutputOwner::ResourceCache(claim)];
        let mut caches = HashSet::new();
        let mut parse = |owners: &[OutputOwner]| {
            parse_submitted("owners", owners.iter().copied().map(submitted).collect(), &mut caches)
        };
        assert_eq!(parse(&owners).expect("valid owners"), owners);
        assert_eq!(parse(&owners[..1]).expect("a build may own several outputs"), owners[..1]);
        parse(&owners[1..2]).expect_err("the cache is named twice");
        parse(&[owners[0]; 101]).expect_err("too many owners");
        let none = vec![artifacts::OutputOwner { owner: None }];
        parse_settled("owners", none, &mut HashSet::new()).expect_err("the owner is missing");
        let malformed = artifacts::output_owner::Owner::TaskCacheId("x".to_owned());
        let malformed = vec![artifacts::OutputOwner { owner: Some(malformed) }];
        parse_settled("owners", malformed, &mut HashSet::new()).expect_err("the id is malformed");
    }
}
