//! The operator's policy: permissions and default limits of workloads on a host worker.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::network::Pool;

/// A permission that weakens the isolation of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Permission {
    /// Use a view of this machine's root file system as the image
    HostImage,
    /// Share the network of this machine, including its loopback
    HostNetwork,
    /// Have all capabilities and devices, equivalent to root on this machine
    Privileged,
}

/// Policy for workloads on this machine: flags of its gateway.
#[derive(Debug, Clone, clap::Args)]
pub struct Policy {
    /// Permissions of workloads on this machine, separated by commas; `none` for no permission
    #[arg(long = "allow", env = "GANTRY_WORKER_ALLOW", value_name = "LIST", value_parser = parse_permissions)]
    allow: Option<Permissions>,
    /// Paths of this machine that the image `host` shows read-only, in addition to programs,
    /// libraries and parts of /etc; separated by commas
    #[arg(long = "host-path", env = "GANTRY_WORKER_HOST_PATHS", value_name = "PATH", value_delimiter = ',', value_parser = parse_path)]
    host_paths: Vec<PathBuf>,
    /// Address pool of containers with a private network: an IPv4 network of 8 to 24 bits that
    /// nothing else uses on this machine
    #[arg(long, env = "GANTRY_WORKER_NETWORK_POOL", value_name = "NETWORK", default_value_t)]
    network_pool: Pool,
    /// Limit of processes and threads in a container whose workload states no limit
    #[arg(
        long,
        env = "GANTRY_WORKER_CONTAINER_PIDS",
        value_name = "COUNT",
        default_value_t = CONTAINER_PIDS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    container_pids: u32,
    /// Memory limit of a container whose workload states no limit: `8G`. Default: nine tenths of
    /// this machine's memory
    #[arg(long, env = "GANTRY_WORKER_CONTAINER_MEMORY", value_name = "SIZE", value_parser = server::settings::size)]
    container_memory: Option<u64>,
}

/// Default limit of processes and threads in a container. Large builds stay below 1,000.
const CONTAINER_PIDS: u32 = 8192;

impl Default for Policy {
    fn default() -> Self {
        Self {
            allow: None,
            host_paths: Vec::new(),
            network_pool: Pool::default(),
            container_pids: CONTAINER_PIDS,
            container_memory: None,
        }
    }
}

type Permissions = BTreeSet<Permission>;

impl Policy {
    /// Allows exactly these permissions.
    #[must_use]
    pub fn allowing(permissions: impl IntoIterator<Item = Permission>) -> Self {
        Self { allow: Some(permissions.into_iter().collect()), ..Self::default() }
    }

    /// Allows these permissions if the operator has not set any.
    #[must_use]
    pub fn or(mut self, permissions: impl IntoIterator<Item = Permission>) -> Self {
        self.allow.get_or_insert_with(|| permissions.into_iter().collect());
        self
    }

    pub(super) fn allows(&self, permission: Permission) -> bool {
        self.allow.as_ref().is_some_and(|allowed| allowed.contains(&permission))
    }

    /// Adds these paths of the machine to the image `host`.
    #[must_use]
    pub fn showing(self, host_paths: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { host_paths: host_paths.into_iter().collect(), ..self }
    }

    pub(super) fn host_paths(&self) -> &[PathBuf] {
        &self.host_paths
    }

    /// Sets the address pool of containers.
    #[must_use]
    pub fn with_network_pool(self, network_pool: Pool) -> Self {
        Self { network_pool, ..self }
    }

    /// Sets the default limit of processes and threads in a container.
    #[must_use]
    pub fn with_container_pids(self, container_pids: u32) -> Self {
        Self { container_pids, ..self }
    }

    /// Sets the default memory limit of a container, in bytes.
    #[must_use]
    pub fn with_container_memory(self, bytes: u64) -> Self {
        Self { container_memory: Some(bytes), ..self }
    }

    /// The default memory limit of a container on a machine with `machine_bytes` of memory, in
    /// bytes.
    pub(super) fn container_memory(&self, machine_bytes: u64) -> u64 {
        self.container_memory.unwrap_or(machine_bytes / 10 * 9)
    }

    pub(super) fn container_pids(&self) -> u64 {
        self.container_pids.into()
    }

    pub(super) fn network_pool(&self) -> Pool {
        self.network_pool
    }
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    let fresh = ["/proc", "/sys", "/dev", "/run", "/tmp"].iter().any(|fresh| path.starts_with(fresh));
    if !path.is_absolute() || !path.components().all(plain) || path == Path::new("/") || fresh {
        return Err(
            "expected an absolute path that is not / and not in /proc, /sys, /dev, /run or /tmp".to_owned()
        );
    }
    Ok(path.to_owned())
}

fn parse_permissions(text: &str) -> Result<Permissions, String> {
    use clap::ValueEnum;
    if matches!(text, "" | "none") {
        return Ok(Permissions::new());
    }
    let parse = |name: &str| {
        Permission::from_str(name.trim(), false).map_err(|_| {
            let names: Vec<_> = Permission::value_variants()
                .iter()
                .filter_map(|known| Some(known.to_possible_value()?.get_name().to_owned()))
                .collect();
            format!("{name:?} is none of {}, none", names.join(", "))
        })
    };
    text.split(',').map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_permissions_is_parsed() {
        let all = [Permission::HostImage, Permission::HostNetwork, Permission::Privileged];
        assert_eq!(parse_permissions("privileged,host-image, host-network"), Ok(all.into()));
        assert_eq!(parse_permissions("none"), Ok(Permissions::new()));
        let refused = parse_permissions("host-image,root").expect_err("there is no such permission");
        assert_eq!(refused, "\"root\" is none of host-image, host-network, privileged, none");
    }

    #[test]
    fn operator_overrides_default() {
        let explicit = Policy { allow: Some(Permissions::new()), ..Policy::default() };
        assert!(!explicit.or([Permission::HostImage]).allows(Permission::HostImage));
        assert!(Policy::default().or([Permission::HostImage]).allows(Permission::HostImage));
        assert!(!Policy::default().allows(Permission::Privileged));
    }
}
