//! What the operator of a machine lets workloads ask of it.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::network::Pool;

/// Something that makes a container less confined than any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Permission {
    /// Run in a view of this machine's own root file system
    HostImage,
    /// Share the network of this machine, its loopback included
    HostNetwork,
    /// Have all capabilities and devices: as good as root on this machine
    Privileged,
}

/// What workloads may ask of this machine: flags of its gateway.
#[derive(Debug, Clone, clap::Args)]
pub struct Policy {
    /// What workloads may ask of this machine, with commas between; `none` for nothing
    #[arg(long = "allow", env = "GANTRY_WORKER_ALLOW", value_name = "LIST", value_parser = parse_permissions)]
    allow: Option<Permissions>,
    /// A path of this machine that the image `host` shows beside programs, libraries and parts of /etc, read-only; several with commas between
    #[arg(long = "host-path", env = "GANTRY_WORKER_HOST_PATHS", value_name = "PATH", value_delimiter = ',', value_parser = parse_path)]
    host_paths: Vec<PathBuf>,
    /// The addresses of containers with a private network: an IPv4 network of 8 to 24 bits that nothing else uses on this machine
    #[arg(long, env = "GANTRY_WORKER_NETWORK_POOL", value_name = "NETWORK", default_value_t)]
    network_pool: Pool,
    /// Processes and threads in a container whose workload states no limit
    #[arg(
        long,
        env = "GANTRY_WORKER_CONTAINER_PIDS",
        value_name = "COUNT",
        default_value_t = CONTAINER_PIDS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    container_pids: u32,
    /// Memory of a container whose workload states no limit: `8G`. Default: nine tenths of this machine's memory
    #[arg(long, env = "GANTRY_WORKER_CONTAINER_MEMORY", value_name = "SIZE", value_parser = server::settings::size)]
    container_memory: Option<u64>,
}

/// Processes and threads in a container whose workload states no limit, by default. Large builds stay below 1,000.
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
    /// Allows just these.
    #[must_use]
    pub fn allowing(permissions: impl IntoIterator<Item = Permission>) -> Self {
        Self { allow: Some(permissions.into_iter().collect()), ..Self::default() }
    }

    /// Allows these where the operator said nothing.
    #[must_use]
    pub fn or(mut self, permissions: impl IntoIterator<Item = Permission>) -> Self {
        self.allow.get_or_insert_with(|| permissions.into_iter().collect());
        self
    }

    pub(super) fn allows(&self, permission: Permission) -> bool {
        self.allow.as_ref().is_some_and(|allowed| allowed.contains(&permission))
    }

    /// Shows these paths of the machine in the image `host`.
    #[must_use]
    pub fn showing(self, host_paths: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { host_paths: host_paths.into_iter().collect(), ..self }
    }

    pub(super) fn host_paths(&self) -> &[PathBuf] {
        &self.host_paths
    }

    /// Takes the addresses of containers from this pool.
    #[must_use]
    pub fn with_network_pool(self, network_pool: Pool) -> Self {
        Self { network_pool, ..self }
    }

    /// Allows so many processes and threads in a container whose workload states no limit.
    #[must_use]
    pub fn with_container_pids(self, container_pids: u32) -> Self {
        Self { container_pids, ..self }
    }

    /// Allows so many bytes of memory in a container whose workload states no limit.
    #[must_use]
    pub fn with_container_memory(self, bytes: u64) -> Self {
        Self { container_memory: Some(bytes), ..self }
    }

    /// Bytes of memory in a container whose workload states no limit, on a machine with so many.
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
            "write an absolute path that is neither / nor in /proc, /sys, /dev, /run or /tmp".to_owned()
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
    fn list_of_permissions_is_read() {
        let all = [Permission::HostImage, Permission::HostNetwork, Permission::Privileged];
        assert_eq!(parse_permissions("privileged,host-image, host-network"), Ok(all.into()));
        assert_eq!(parse_permissions("none"), Ok(Permissions::new()));
        let refused = parse_permissions("host-image,root").expect_err("there is no such permission");
        assert_eq!(refused, "\"root\" is none of host-image, host-network, privileged, none");
    }

    #[test]
    fn operator_overrides_default() {
        let said = Policy { allow: Some(Permissions::new()), ..Policy::default() };
        assert!(!said.or([Permission::HostImage]).allows(Permission::HostImage));
        assert!(Policy::default().or([Permission::HostImage]).allows(Permission::HostImage));
        assert!(!Policy::default().allows(Permission::Privileged));
    }
}
