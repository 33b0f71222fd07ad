//! Simulated worker machines, which can be rebooted or removed.
//!
//! Each machine has its own mount namespace with its own boot id. If this machine permits that,
//! each also has a network namespace with its own address.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{describe, snapshot, wait_for};

/// Simulated machines, and the network between them and this machine.
pub struct Machines {
    home: PathBuf,
    network: Option<Network>,
    machines: Vec<Option<Machine>>,
    boots: u32,
}

/// Machine that is switched on: the process that holds its mount namespace.
struct Machine(Child);

impl Machines {
    /// Switches on `count` machines. Their files are in `home`: `state-0`, `run-0` and so on.
    #[must_use]
    pub fn new(home: &Path, count: usize) -> Self {
        let mut machines =
            Self { home: home.to_owned(), network: Network::new(count), machines: Vec::new(), boots: 0 };
        for index in 0..count {
            machines.machines.push(None);
            machines.switch_on(index);
        }
        machines
    }

    /// Returns the address of this machine for all simulated machines.
    #[must_use]
    pub fn own_address(&self) -> String {
        self.network
            .as_ref()
            .map_or_else(|| "127.0.0.1".to_owned(), |network| format!("{}.1", network.prefix))
    }

    /// Returns the address of a machine.
    #[must_use]
    pub fn address(&self, index: usize) -> String {
        let network = self.network.as_ref();
        network.map_or_else(|| "127.0.0.1".to_owned(), |network| format!("{}.{}", network.prefix, index + 11))
    }

    /// Returns a directory of a machine.
    #[must_use]
    pub fn directory(&self, kind: &str, index: usize) -> PathBuf {
        self.home.join(format!("{kind}-{index}"))
    }

    /// Returns the words that precede a command in order to run it on a machine.
    #[must_use]
    pub fn prefix(&self, index: usize) -> Vec<String> {
        let Machine(keeper) = self.machines[index].as_ref().expect("it is switched on");
        let mut words = vec!["nsenter".to_owned(), format!("--mount=/proc/{}/ns/mnt", keeper.id())];
        words
            .extend(self.network.as_ref().map(|network| format!("--net=/run/netns/{}", network.name(index))));
        words
    }

    fn switch_on(&mut self, index: usize) {
        self.boots += 1;
        let boot = self.directory("boot", index);
        fs::write(&boot, format!("00000000-0000-4000-8000-{:012}\n", self.boots)).expect("a boot id");
        let script = "mount --bind \"$1\" /proc/sys/kernel/random/boot_id; echo on; exec sleep infinity";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", script, "machine"]).arg(&boot);
        // The variable marks the process as one of the machine.
        command.env("MACHINE", self.directory("state", index)).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut keeper = command.spawn().expect("unshare");
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        assert_eq!(line, "on\n");
        self.machines[index] = Some(Machine(keeper));
    }

    /// Returns the processes of a machine.
    #[must_use]
    pub fn processes(&self, index: usize) -> BTreeMap<i32, String> {
        let mut found = snapshot::processes_of(&self.directory("state", index));
        found.extend(snapshot::processes_of(&self.directory("run", index)));
        found
    }

    /// Kills all processes of a machine. Its mounts and its memory are lost.
    fn switch_off(&mut self, index: usize) {
        wait_for("the end of everything on a machine", || {
            let processes = self.processes(index);
            for pid in processes.keys() {
                // SAFETY: kill accesses no memory of this process.
                unsafe { libc::kill(*pid, libc::SIGKILL) };
            }
            // The gateway is a child of the suite, which waits for it.
            let ended = |pid: &i32| {
                let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                stat.is_empty() || stat.contains(") Z ")
            };
            processes.keys().all(ended).then_some(())
        });
        if let Some(Machine(mut keeper)) = self.machines[index].take() {
            keeper.kill().ok();
            keeper.wait().expect("it is dead");
        }
        fs::remove_dir_all(self.directory("run", index)).ok();
    }

    /// Switches a machine off and on again. The caller must restart its gateway.
    pub fn reboot(&mut self, index: usize) {
        self.switch_off(index);
        self.switch_on(index);
    }

    /// Removes a machine for good, with all of its files and control groups.
    pub fn remove(&mut self, index: usize) {
        let handles = self.handles(index);
        self.switch_off(index);
        crate::suite::remove_groups(Path::new("/sys/fs/cgroup"), &handles);
        fs::remove_dir_all(self.directory("state", index)).expect("its disk is gone");
    }

    /// Returns the handles of the containers on the disk of a machine.
    #[must_use]
    pub fn handles(&self, index: usize) -> Vec<String> {
        let entries = fs::read_dir(self.directory("state", index).join("containers"));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Lists the files, mounts and processes of containers and volumes on a machine.
    #[must_use]
    pub fn held(&self, index: usize) -> BTreeSet<String> {
        let Machine(keeper) = self.machines[index].as_ref().expect("it is switched on");
        let mut held = BTreeSet::new();
        let state = self.directory("state", index);
        for kind in ["containers", "volumes"] {
            let entries = fs::read_dir(state.join(kind)).into_iter().flatten().flatten();
            held.extend(entries.map(|entry| format!("file {}", entry.path().display())));
        }
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", keeper.id())).expect("its mounts");
        let below = |at: &&str| Path::new(at).starts_with(&self.home);
        held.extend(
            mounts
                .lines()
                .filter_map(|line| line.split(' ').nth(4))
                .filter(below)
                .map(|at| format!("mount {at}")),
        );
        let processes = self.processes(index).into_values();
        let own = |line: &String| line.contains("sleep infinity") || line.ends_with("/runtime-gateway ");
        held.extend(processes.filter(|line| !own(line)).map(|line| format!("process {line}")));
        held
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for index in 0..self.machines.len() {
            self.switch_off(index);
        }
    }
}

/// Bridge in a separate network namespace without packet rules, which connects this machine and all
/// simulated machines.
struct Network {
    own: String,
    prefix: String,
    count: usize,
}

impl Network {
    /// Makes a network. `None`: this machine does not permit that, and a message is printed.
    fn new(count: usize) -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = std::process::id() * 4 + MADE.fetch_add(1, Ordering::Relaxed) % 4;
        let own = format!("gt{number:x}");
        let prefix = format!("10.{}.{}", 64 + (number >> 8) % 64, number & 255);
        let network = Self { own, prefix, count };
        match network.make() {
            Ok(()) => Some(network),
            Err(_) => {
                eprintln!("not applicable: network namespaces of their own cannot be made here");
                None
            }
        }
    }

    fn name(&self, index: usize) -> String {
        format!("{}-{index}", self.own)
    }

    fn make(&self) -> Result<(), String> {
        let Self { own, prefix, .. } = self;
        let hub = format!("{own}-hub");
        ip(&format!("netns add {hub}"))?;
        ip(&format!("-n {hub} link add name br0 type bridge"))?;
        ip(&format!("-n {hub} link set br0 up"))?;
        ip(&format!("link add {own} type veth peer name own netns {hub}"))?;
        ip(&format!("addr add {prefix}.1/24 dev {own}"))?;
        ip(&format!("link set {own} up"))?;
        ip(&format!("-n {hub} link set own master br0 up"))?;
        for index in 0..self.count {
            let (name, address) = (self.name(index), index + 11);
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {hub} link add port{index} type veth peer name eth0 netns {name}"))?;
            ip(&format!("-n {hub} link set port{index} master br0 up"))?;
            ip(&format!("-n {name} addr add {prefix}.{address}/24 dev eth0"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        ip(&format!("link del {}", self.own)).ok();
        for index in 0..self.count {
            ip(&format!("netns del {}", self.name(index))).ok();
        }
        ip(&format!("netns del {}-hub", self.own)).ok();
    }
}

fn ip(words: &str) -> Result<(), String> {
    let output = Command::new("ip").args(words.split(' ')).output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(describe(&output)) }
}
