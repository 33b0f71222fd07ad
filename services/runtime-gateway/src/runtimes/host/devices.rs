//! Device policy of unprivileged containers on control groups of version 2.
//!
//! Version 1 has files for the policy (`devices.allow`, `devices.deny`), which libcontainer writes.
//! On version 2 the kernel runs a BPF program that is attached to the group. The program is
//! attached before the first process enters the group, and stays as long as the group.
//!
//! Sources: `include/uapi/linux/bpf.h` (`struct bpf_cgroup_dev_ctx`, `union bpf_attr`) and
//! `Documentation/admin-guide/cgroup-v2.rst`, "Device controller", of the kernel.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// A permitted character device: its major number, and its minor number or `None` for all.
type Device = (u32, Option<u32>);

/// The devices of a container's `/dev`: null, zero, full, random, urandom, tty, ptmx and
/// pseudo-terminals.
const ALLOWED: &[Device] = &[
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(2)),
    (136, None),
];

/// One BPF instruction.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u8,
    /// The destination register in the lower four bits, the source register in the upper four.
    registers: u8,
    offset: i16,
    value: i32,
}

impl Instruction {
    const fn new(code: u8, registers: u8, offset: i16, value: i32) -> Self {
        Self { code, registers, offset, value }
    }

    /// Loads the 32-bit field at `offset` of the context, which register 1 points to.
    const fn load(register: u8, offset: i16) -> Self {
        Self::new(0x61, register | 1 << 4, offset, 0)
    }

    const fn and(register: u8, value: i32) -> Self {
        Self::new(0x57, register, 0, value)
    }

    const fn set(register: u8, value: i32) -> Self {
        Self::new(0xb7, register, 0, value)
    }

    /// Skips `count` instructions unless `register` has this value.
    const fn skip_unless(register: u8, value: i32, count: i16) -> Self {
        Self::new(0x55, register, count, value)
    }

    const fn exit() -> Self {
        Self::new(0x95, 0, 0, 0)
    }
}

/// Builds the program: it returns 1 for a device in `allowed` and 0 for all others. The kind of
/// access does not matter.
fn program(allowed: &[Device]) -> Vec<Instruction> {
    const CHARACTER: i32 = 2;
    let (kind, major, minor) = (2, 3, 4);
    let number = |number: u32| i32::try_from(number).unwrap_or(-1);
    let answer = |answer| [Instruction::set(0, answer), Instruction::exit()];
    let mut program = vec![
        Instruction::load(kind, 0),
        Instruction::load(major, 4),
        Instruction::load(minor, 8),
        // The lower half is the kind of device, the upper half the access.
        Instruction::and(kind, 0xffff),
    ];
    for (wanted_major, wanted_minor) in allowed {
        match wanted_minor {
            Some(wanted_minor) => program.extend([
                Instruction::skip_unless(kind, CHARACTER, 4),
                Instruction::skip_unless(major, number(*wanted_major), 3),
                Instruction::skip_unless(minor, number(*wanted_minor), 2),
            ]),
            None => program.extend([
                Instruction::skip_unless(kind, CHARACTER, 3),
                Instruction::skip_unless(major, number(*wanted_major), 2),
            ]),
        }
        program.extend(answer(1));
    }
    program.extend(answer(0));
    program
}

/// Forbids all devices except those of a container's `/dev` to the group at `path`.
///
/// Errors: the kernel does not support such programs, or this process may not attach them
/// (`CAP_BPF` or `CAP_SYS_ADMIN`, and `CAP_NET_ADMIN`).
pub(super) fn restrict(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let group = rustix::fs::open(path, flags, Mode::empty())?;
    attach(&load(&program(ALLOWED))?, &group)
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    const PROG_LOAD: libc::c_int = 5;
    const CGROUP_DEVICE: u32 = 15;
    #[repr(C)]
    struct Attributes {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
    }
    let license = c"Apache-2.0";
    let attributes = Attributes {
        kind: CGROUP_DEVICE,
        count: u32::try_from(program.len()).unwrap_or(u32::MAX),
        instructions: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    // SAFETY: the attributes have the stated layout and size, and their pointers outlive the call.
    let loaded =
        unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const attributes, size_of::<Attributes>()) };
    match i32::try_from(loaded) {
        // SAFETY: the descriptor is new.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn attach(program: &OwnedFd, group: &OwnedFd) -> io::Result<()> {
    const PROG_ATTACH: libc::c_int = 8;
    const CGROUP_DEVICE: u32 = 6;
    /// The programs of outer and inner groups must all permit the access.
    const ALLOW_MULTI: u32 = 2;
    #[repr(C)]
    struct Attributes {
        group: i32,
        program: i32,
        kind: u32,
        flags: u32,
    }
    let attributes = Attributes {
        group: group.as_raw_fd(),
        program: program.as_raw_fd(),
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the attributes have the stated layout and size.
    let attached =
        unsafe { libc::syscall(libc::SYS_bpf, PROG_ATTACH, &raw const attributes, size_of::<Attributes>()) };
    if attached == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;
    use crate::runtimes::host::mounts;

    /// Simulates the kernel: `access` is mknod 1, read 2, write 4; `kind` is block 1, character 2.
    fn run(program: &[Instruction], [access, kind, major, minor]: [i64; 4]) -> i64 {
        let (mut registers, mut at) = ([0; 16], 0);
        loop {
            let instruction: Instruction = program[at];
            let (to, value) = (usize::from(instruction.registers & 15), i64::from(instruction.value));
            at += 1;
            match instruction.code {
                0x61 => {
                    registers[to] = match instruction.offset {
                        0 => access << 16 | kind,
                        4 => major,
                        8 => minor,
                        offset => panic!("no field at {offset}"),
                    }
                }
                0x57 => registers[to] &= value,
                0xb7 => registers[to] = value,
                0x55 if registers[to] != value => at += usize::try_from(instruction.offset).expect("forward"),
                0x55 => {}
                0x95 => return registers[0],
                code => panic!("no instruction {code}"),
            }
        }
    }

    #[test]
    fn policy_allows_container_devices_only() {
        let program = program(ALLOWED);
        for access in [1, 2, 4, 6, 7] {
            for (major, minor) in
                [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2), (136, 0), (136, 77)]
            {
                assert_eq!(run(&program, [access, 2, major, minor]), 1, "character {major}:{minor}");
                assert_eq!(run(&program, [access, 1, major, minor]), 0, "block {major}:{minor}");
            }
            for (major, minor) in
                [(1, 1), (1, 2), (1, 4), (1, 11), (5, 1), (7, 0), (8, 0), (10, 200), (254, 0)]
            {
                assert_eq!(run(&program, [access, 2, major, minor]), 0, "character {major}:{minor}");
                assert_eq!(run(&program, [access, 1, major, minor]), 0, "block {major}:{minor}");
            }
        }
    }

    #[test]
    fn kernel_enforces_policy_on_group() -> io::Result<()> {
        let mounted = mounts::mount_table()?;
        let Some(root) = mounted.iter().find(|mount| mount.kind == "cgroup2") else {
            eprintln!("not applicable: no cgroup of version 2");
            return Ok(());
        };
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: not root");
            return Ok(());
        }
        let group = root.at.join(format!("gantry-{}", domain::ProcessId::new()));
        fs::create_dir(&group)?;
        let directory = tempfile::tempdir()?;
        let kmsg = directory.path().join("kmsg");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &kmsg,
            rustix::fs::FileType::CharacterDevice,
            Mode::from_raw_mode(0o600),
            rustix::fs::makedev(1, 11),
        )?;
        fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&kmsg)?;
        restrict(&group)?;
        let join = group.join("cgroup.procs");
        let mut shell = Command::new("sh");
        let script = r#"head -c 1 /dev/zero > /dev/null && echo zero; (: < "$0") && echo kmsg; mknod "$0.2" c 1 11 && echo made"#;
        shell.args(["-c", script]).arg(&kmsg);
        // SAFETY: the closure only writes to a file.
        unsafe { shell.pre_exec(move || fs::write(&join, "0")) };
        let said = shell.output()?;
        fs::remove_dir(&group)?;
        let errors = String::from_utf8_lossy(&said.stderr).into_owned();
        assert_eq!(String::from_utf8_lossy(&said.stdout), "zero\n", "{errors}");
        assert_eq!(errors.matches("Operation not permitted").count(), 2, "{errors}");
        Ok(())
    }
}
