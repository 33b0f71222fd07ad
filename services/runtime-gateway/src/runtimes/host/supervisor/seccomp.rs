//! System call filters of a container: the default profile of common container engines, by name.
//!
//! There are four filters. The strictest result counts, and between equal results that of the later
//! filter. Only the machine's native calling convention is allowed.
//!
//! 1. The first filter allows the listed calls, and returns `EPERM` for all others.
//! 2. The second returns `ENOSYS`, so that libraries use an older call. It covers `clone3`, whose
//!    flags a filter cannot inspect, and `io_setup`, whose limit all processes of the machine
//!    share. It also covers calls newer than the list.
//! 3. The third returns `EAFNOSUPPORT` for sockets of unlisted families.
//! 4. The fourth returns `ENOTTY` for requests of btrfs.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

/// The newest listed call. Newer calls do not exist for a container.
const NEWEST: u32 = 462;

/// All flags of `clone` that create a namespace.
const NAMESPACES: u64 = 0x7e02_0080;

macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name as i64),*] };
}

#[rustfmt::skip]
const ALLOWED: &[i64] = calls![
    SYS_accept SYS_accept4 SYS_adjtimex SYS_bind SYS_brk SYS_capget SYS_capset SYS_chdir SYS_chroot SYS_clock_adjtime
    SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_close SYS_close_range SYS_connect SYS_copy_file_range
    SYS_dup SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_eventfd2 SYS_execve
    SYS_execveat SYS_exit SYS_exit_group SYS_faccessat SYS_faccessat2 SYS_fadvise64 SYS_fallocate SYS_fanotify_mark
    SYS_fchdir SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_fcntl SYS_fdatasync SYS_fgetxattr SYS_flistxattr
    SYS_flock SYS_fremovexattr SYS_fsetxattr SYS_fstat SYS_fstatfs SYS_fsync SYS_ftruncate SYS_futex SYS_futex_waitv
    SYS_get_mempolicy SYS_get_robust_list SYS_getcpu SYS_getcwd SYS_getdents64 SYS_getegid SYS_geteuid SYS_getgid
    SYS_getgroups SYS_getitimer SYS_getpeername SYS_getpgid SYS_getpid SYS_getppid SYS_getpriority SYS_getrandom
    SYS_getresgid SYS_getresuid SYS_getrlimit SYS_getrusage SYS_getsid SYS_getsockname SYS_getsockopt SYS_gettid
    SYS_gettimeofday SYS_getuid SYS_getxattr SYS_inotify_add_watch SYS_inotify_init1 SYS_inotify_rm_watch
    SYS_io_cancel SYS_io_destroy SYS_io_getevents SYS_io_submit SYS_ioctl SYS_ioprio_get SYS_ioprio_set
    SYS_kill SYS_landlock_add_rule SYS_landlock_create_ruleset SYS_landlock_restrict_self SYS_lgetxattr SYS_linkat
    SYS_listen SYS_listxattr SYS_llistxattr SYS_lremovexattr SYS_lseek SYS_lsetxattr SYS_madvise SYS_membarrier
    SYS_memfd_create SYS_memfd_secret SYS_mincore SYS_mkdirat SYS_mknodat SYS_mlock SYS_mlock2 SYS_mlockall SYS_mmap
    SYS_mprotect SYS_mq_getsetattr SYS_mq_notify SYS_mq_open SYS_mq_timedreceive SYS_mq_timedsend SYS_mq_unlink
    SYS_mremap SYS_msgctl SYS_msgget SYS_msgrcv SYS_msgsnd SYS_msync SYS_munlock SYS_munlockall SYS_munmap
    SYS_name_to_handle_at SYS_nanosleep SYS_newfstatat SYS_openat SYS_openat2 SYS_pidfd_getfd SYS_pidfd_open
    SYS_pidfd_send_signal SYS_pipe2 SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect SYS_ppoll SYS_prctl SYS_pread64
    SYS_preadv SYS_preadv2 SYS_prlimit64 SYS_process_madvise SYS_process_mrelease SYS_process_vm_readv
    SYS_process_vm_writev SYS_pselect6 SYS_ptrace SYS_pwrite64 SYS_pwritev SYS_pwritev2 SYS_read SYS_readahead
    SYS_readlinkat SYS_readv SYS_recvfrom SYS_recvmmsg SYS_recvmsg SYS_remap_file_pages SYS_removexattr SYS_renameat
    SYS_renameat2 SYS_restart_syscall SYS_rseq SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask
    SYS_rt_sigqueueinfo SYS_rt_sigreturn SYS_rt_sigsuspend SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo
    SYS_sched_get_priority_max SYS_sched_get_priority_min SYS_sched_getaffinity SYS_sched_getattr
    SYS_sched_getparam SYS_sched_getscheduler SYS_sched_rr_get_interval SYS_sched_setaffinity SYS_sched_setattr
    SYS_sched_setparam SYS_sched_setscheduler SYS_sched_yield SYS_seccomp SYS_semctl SYS_semget SYS_semop
    SYS_semtimedop SYS_sendfile SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_set_robust_list SYS_set_tid_address
    SYS_setfsgid SYS_setfsuid SYS_setgid SYS_setgroups SYS_setitimer SYS_setpgid SYS_setpriority SYS_setregid
    SYS_setresgid SYS_setresuid SYS_setreuid SYS_setrlimit SYS_setsid SYS_setsockopt SYS_setuid SYS_setxattr
    SYS_shmat SYS_shmctl SYS_shmdt SYS_shmget SYS_shutdown SYS_sigaltstack SYS_signalfd4 SYS_socket SYS_socketpair SYS_splice
    SYS_statfs SYS_statx SYS_symlinkat SYS_sync SYS_sync_file_range SYS_syncfs SYS_sysinfo SYS_tee SYS_tgkill
    SYS_timer_create SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime SYS_timerfd_create
    SYS_timerfd_gettime SYS_timerfd_settime SYS_times SYS_tkill SYS_truncate SYS_umask SYS_uname SYS_unlinkat
    SYS_utimensat SYS_vmsplice SYS_wait4 SYS_waitid SYS_write SYS_writev
    SYS_fchmodat2 SYS_set_mempolicy_home_node
];

/// Calls that exist only on the oldest of the architectures.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const LEGACY: &[i64] = calls![
    SYS_access SYS_alarm SYS_arch_prctl SYS_chmod SYS_chown SYS_creat SYS_dup2 SYS_epoll_create SYS_epoll_ctl_old
    SYS_epoll_wait SYS_epoll_wait_old SYS_eventfd SYS_fork SYS_futimesat SYS_getdents SYS_getpgrp
    SYS_inotify_init SYS_lchown SYS_link SYS_lstat SYS_mkdir SYS_mknod SYS_modify_ldt SYS_open SYS_pause SYS_pipe
    SYS_poll SYS_readlink SYS_rename SYS_rmdir SYS_select SYS_signalfd SYS_stat SYS_symlink SYS_time SYS_unlink
    SYS_utime SYS_utimes SYS_vfork
];
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[i64] = &[];

/// The filters of an unprivileged container, in installation order.
pub(super) fn filters() -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    rules.extend(ALLOWED.iter().chain(LEGACY).map(|call| (*call, Vec::new())));
    // Allowed here, so that the result of the second filter counts.
    rules.insert(libc::SYS_clone3, Vec::new());

    // Arguments that the kernel reads as 32 bits are compared as 32 bits, so the other half has no
    // effect.
    let only = |argument, length, operator, value| {
        SeccompRule::new(vec![SeccompCondition::new(argument, length, operator, value)?])
    };
    let (int, long) = (SeccompCmpArgLen::Dword, SeccompCmpArgLen::Qword);
    let is = |argument, value| only(argument, int.clone(), SeccompCmpOp::Eq, value);
    rules.insert(libc::SYS_clone, vec![only(0, long, SeccompCmpOp::MaskedEq(NAMESPACES), 0)?]);
    // Personalities that do not weaken the isolation of a container.
    let personalities = [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
    let personalities = personalities.into_iter().map(|personality| is(0, personality));
    rules.insert(libc::SYS_personality, personalities.collect::<Result<_, _>>()?);

    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let listed = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)?;
    Ok(vec![listed.try_into()?, unknown(), sockets(), btrfs()])
}

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Offset of the call number in the filter's input.
const CALL: u32 = 0;

/// Offset of the lower half of an argument, which is the part that the kernel reads of an `int`.
const fn argument(number: u32) -> u32 {
    16 + 8 * number
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn errno_action(errno: libc::c_int) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()
}

/// Returns `ENOSYS` for `clone3`, `io_setup`, and calls newer than the list.
fn unknown() -> BpfProgram {
    let number = |call: libc::c_long| u32::try_from(call).unwrap_or(0);
    vec![
        instruction(LOAD, 0, 0, CALL),
        instruction(AT_LEAST, 2, 0, NEWEST + 1),
        instruction(EQUAL, 1, 0, number(libc::SYS_io_setup)),
        instruction(EQUAL, 0, 1, number(libc::SYS_clone3)),
        instruction(RETURN, 0, 0, errno_action(libc::ENOSYS)),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

/// Returns `EAFNOSUPPORT` for sockets, except local sockets, IP, and netlink for addresses, routes
/// and socket statistics.
///
/// Sockets to the hypervisor bypass network namespaces. Netlink between programs uses memory that
/// no control group accounts. Netlink for device events reveals the machine's devices. Most other
/// families are not used in containers, and would expose kernel code to every user.
fn sockets() -> BpfProgram {
    let number = |call: libc::c_long| u32::try_from(call).unwrap_or(0);
    let family = |family: libc::c_int| family.unsigned_abs();
    vec![
        instruction(LOAD, 0, 0, CALL),
        instruction(EQUAL, 1, 0, number(libc::SYS_socket)),
        instruction(EQUAL, 0, 9, number(libc::SYS_socketpair)),
        instruction(LOAD, 0, 0, argument(0)),
        instruction(EQUAL, 7, 0, family(libc::AF_UNIX)),
        instruction(EQUAL, 6, 0, family(libc::AF_INET)),
        instruction(EQUAL, 5, 0, family(libc::AF_INET6)),
        instruction(EQUAL, 0, 3, family(libc::AF_NETLINK)),
        instruction(LOAD, 0, 0, argument(2)),
        instruction(EQUAL, 2, 0, family(libc::NETLINK_ROUTE)),
        instruction(EQUAL, 1, 0, family(libc::NETLINK_SOCK_DIAG)),
        instruction(RETURN, 0, 0, errno_action(libc::EAFNOSUPPORT)),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

/// Returns `ENOTTY` for btrfs requests, except those that share blocks, which other file systems
/// have too. Without this filter, the owner of a directory could create subvolumes that cannot be
/// removed, and snapshots that multiply the data of a scan.
fn btrfs() -> BpfProgram {
    const MASK: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
    const KIND: u32 = 0xff00;
    const BTRFS: u32 = 0x9400;
    const CLONE: u32 = 0x4004_9409;
    const CLONE_RANGE: u32 = 0x4020_940d;
    const DEDUPLICATE: u32 = 0xc018_9436;
    vec![
        instruction(LOAD, 0, 0, CALL),
        instruction(EQUAL, 0, 7, u32::try_from(libc::SYS_ioctl).unwrap_or(0)),
        instruction(LOAD, 0, 0, argument(1)),
        instruction(EQUAL, 5, 0, CLONE),
        instruction(EQUAL, 4, 0, CLONE_RANGE),
        instruction(EQUAL, 3, 0, DEDUPLICATE),
        instruction(MASK, 0, 0, KIND),
        instruction(EQUAL, 0, 1, BTRFS),
        instruction(RETURN, 0, 0, errno_action(libc::ENOTTY)),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_compile_and_exclude_dangerous_calls() -> Result<(), seccompiler::BackendError> {
        assert_eq!(filters()?.len(), 4);
        let refused = calls![
            SYS_mount SYS_umount2 SYS_pivot_root SYS_setns SYS_unshare SYS_kexec_load SYS_init_module
            SYS_finit_module SYS_delete_module SYS_bpf SYS_perf_event_open SYS_keyctl SYS_add_key SYS_request_key
            SYS_open_by_handle_at SYS_swapon SYS_swapoff SYS_reboot SYS_settimeofday SYS_clock_settime SYS_acct
            SYS_quotactl SYS_userfaultfd SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_fsopen
            SYS_fsmount SYS_fsconfig SYS_move_mount SYS_open_tree SYS_mount_setattr SYS_lookup_dcookie
            SYS_nfsservctl SYS_syslog SYS_vhangup SYS_kcmp SYS_sethostname
        ];
        assert!(refused.iter().all(|call| !ALLOWED.contains(call) && !LEGACY.contains(call)));
        Ok(())
    }
}
