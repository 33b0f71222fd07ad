//! Memory guard: ends the container that holds the most memory when the machine's memory is nearly
//! exhausted.
//!
//! The OOM killer of the kernel ignores files in `/dev/shm` and `/tmp`, and messages in netlink and
//! `ping` sockets. It would therefore kill another container. No control group accounts for these
//! messages (`net/netlink/af_netlink.c` and `net/ipv4/ping.c` charge no group), and a process may
//! have many such sockets.

use std::fs;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use domain::{ProcessId, error_chain};
use runtime::RuntimeError;

use super::persisted::OwnNetwork;
use super::supervisor_protocol::Request;
use super::{Host, HostRuntime};
use crate::util::blocking::blocking;

/// Poll interval of the available memory while a process runs.
const INTERVAL: Duration = Duration::from_millis(250);
/// Number of polls until the guard checks whether a process still runs.
const POLLS: usize = 20;
/// Reserved memory, as a fraction of all memory: 1/32.
const AVAILABLE: u64 = 32;
/// Limit of the reserved memory, in bytes.
const MAX_AVAILABLE: u64 = 512 << 20;
/// Least memory of a container that the guard ends, in bytes.
const MIN_KEPT: u64 = 64 << 20;
/// Timeout of a supervisor's answer. An older supervisor does not know the request.
const ANSWER: Duration = Duration::from_secs(5);

impl HostRuntime {
    /// Runs the memory guard with the default reserve. The future never completes.
    pub(super) async fn guard_memory(self: Arc<Self>) {
        let total = memory("MemTotal").unwrap_or(0);
        self.guard_available_memory((total / AVAILABLE).min(MAX_AVAILABLE)).await;
    }

    /// Runs the memory guard, which keeps `reserve` bytes of memory and swap available. The future
    /// never completes.
    pub async fn guard_available_memory(self: Arc<Self>, reserve: u64) {
        loop {
            self.host.until_any_runs().await;
            for _ in 0..POLLS {
                if let Err(error) = self.keep_available(reserve).await {
                    tracing::warn!(error = error_chain(&error), "cannot keep memory available");
                }
                tokio::time::sleep(INTERVAL).await;
            }
        }
    }

    async fn keep_available(&self, reserve: u64) -> Result<(), RuntimeError> {
        let host = Arc::clone(&self.host);
        let Some((id, bytes)) = blocking(move || host.choose_to_end_for_memory(reserve)).await? else {
            return Ok(());
        };
        let kept = format!("{} MiB", bytes >> 20);
        tracing::warn!(process.id = %id, kept, "ending the container that holds the most memory of the machine");
        self.end_for_memory(id).await
    }

    async fn end_for_memory(&self, process: ProcessId) -> Result<(), RuntimeError> {
        let process = self.host.find(process)?;
        let answer =
            tokio::time::timeout(ANSWER, self.host.send_request(&process, &Request::EndForMemory)).await;
        match answer {
            Ok(answer) => _ = answer?,
            Err(_) => {
                let killed = self.host.kill_container(&process);
                killed.map_err(|error| RuntimeError::io("kill a container", error))?;
            }
        }
        // The memory is released while the processes end.
        let ended = Host::wait(&self.host, process.id);
        tokio::time::timeout(ANSWER, ended).await.map_or(Ok(()), |ended| ended.map(drop))
    }
}

impl Host {
    /// Selects the process to end because the machine's memory is nearly exhausted. Returns it with
    /// the memory that it holds.
    fn choose_to_end_for_memory(&self, reserve: u64) -> Result<Option<(ProcessId, u64)>, RuntimeError> {
        let available = memory("MemAvailable").map(|bytes| bytes + memory("SwapFree").unwrap_or(0));
        if available.is_none_or(|available| available >= reserve) {
            return Ok(None);
        }
        let mut most = None;
        for process in self.running_main_processes() {
            // In the network of the machine, other programs have sockets too.
            let is_alone = self
                .read_container(process.container)?
                .is_some_and(|container| container.network != OwnNetwork::Host);
            let cgroup = process.cgroup();
            let pid = self.cgroups.processes(&cgroup).into_iter().next().filter(|_| is_alone);
            // The process may have ended.
            let in_sockets = pid.and_then(|pid| in_sockets(pid).ok()).unwrap_or(0);
            let kept = self.cgroups.kept_memory(&cgroup).unwrap_or(0);
            most = most.max(Some((kept + in_sockets, process.id)));
        }
        Ok(most.filter(|(kept, _)| *kept >= MIN_KEPT).map(|(kept, id)| (id, kept)))
    }
}

/// A value of `/proc/meminfo`, in bytes.
fn memory(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes in the queues of such sockets in the network of a process.
fn in_sockets(pid: u32) -> io::Result<u64> {
    let table = |name: &str| fs::read_to_string(format!("/proc/{pid}/net/{name}"));
    // A kernel without IPv6 does not have this table.
    let ping = ["icmp", "icmp6"].map(|name| waiting_for_ping(&table(name).unwrap_or_default()));
    Ok(waiting_for_netlink(&table("netlink")?) + ping.iter().sum::<u64>())
}

/// The sum of the column `Rmem`.
fn waiting_for_netlink(table: &str) -> u64 {
    let column = |line: &str| line.split_whitespace().nth(4)?.parse::<u64>().ok();
    table.lines().skip(1).filter_map(column).sum()
}

/// The sum of the second half of the column `tx_queue rx_queue`.
fn waiting_for_ping(table: &str) -> u64 {
    let column = |line: &str| {
        let (_, received) = line.split_whitespace().nth(4)?.split_once(':')?;
        u64::from_str_radix(received, 16).ok()
    };
    table.lines().skip(1).filter_map(column).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_queues_are_summed() {
        let table = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n\
            0000000000000000 0   0          00000000 0        0        0     2        0        7       \n\
            0000000000000000 0   3152       00000000 8388864  0        0     2        19       90123   \n\
            0000000000000000 2   3153       00000000 1000     0        0     2        0        90124   \n";
        assert_eq!(waiting_for_netlink(table), 8_389_864);
        assert_eq!(waiting_for_netlink(""), 0);
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n\
            1234: 00000000:0001 00000000:0000 07 00000000:00020000 00:00000000 00000000     0        0 4711 2 0000000000000000 0\n";
        assert_eq!(waiting_for_ping(table), 0x2_0000);
        assert!(memory("MemTotal") > memory("MemAvailable"));
    }
}
