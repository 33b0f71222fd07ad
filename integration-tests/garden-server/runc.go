package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"code.cloudfoundry.org/garden"
)

const (
	// Where a container finds its init: in /dev, which is its own, so that nothing of it stays in the root.
	initPath = "/dev/init"
	// Not in package syscall.
	setChildSubreaper = 36
)

// What guardian leaves to who is root in a container that is not privileged.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// Makes containers by runc, as guardian does: one command makes a container around an init that only waits, each process is brought into
// it by another. They have namespaces and cgroups of their own, on the network the loopback alone. Guardian gives them more: a user
// namespace, seccomp, limits, a network to the outside, and beside each process another one that outlives the server.
type runc struct {
	// Holds everything that is made.
	directory string
	// This one, which is also the init of containers.
	program  string
	defaults config
}

// A bundle's config.json. What is not in it is not set; what is raw stays as `runc spec` has it.
type config struct {
	Version  string          `json:"ociVersion"`
	Process  processConfig   `json:"process"`
	Root     rootConfig      `json:"root"`
	Hostname string          `json:"hostname"`
	Mounts   []mountConfig   `json:"mounts"`
	Linux    json.RawMessage `json:"linux"`
}

type processConfig struct {
	Args         []string            `json:"args"`
	Env          []string            `json:"env"`
	Dir          string              `json:"cwd"`
	User         userConfig          `json:"user"`
	Capabilities map[string][]string `json:"capabilities"`
}

type userConfig struct {
	User  uint32 `json:"uid"`
	Group uint32 `json:"gid"`
}

type rootConfig struct {
	Path string `json:"path"`
}

type mountConfig struct {
	To      string   `json:"destination"`
	Type    string   `json:"type"`
	From    string   `json:"source"`
	Options []string `json:"options"`
}

func newRunc() (*runc, error) {
	// What runc starts and leaves becomes a child of this process, which can wait for it.
	_, _, failed := syscall.RawSyscall(syscall.SYS_PRCTL, setChildSubreaper, 1, 0)
	if failed != 0 {
		return nil, failed
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	directory, err := os.MkdirTemp("", "garden-server-")
	if err != nil {
		return nil, err
	}
	r := &runc{directory: directory, program: program}
	if output, err := exec.Command("runc", "spec", "--bundle", directory).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("runc spec: %w: %s", err, output)
	}
	text, err := os.ReadFile(filepath.Join(directory, "config.json"))
	if err != nil {
		return nil, err
	}
	return r, json.Unmarshal(text, &r.defaults)
}

func (r *runc) remove() error { return os.RemoveAll(r.directory) }

func newProcessConfig(args []string, env []string, dir string, user userConfig) processConfig {
	kept := map[string][]string{"bounding": capabilities, "effective": capabilities, "permitted": capabilities}
	return processConfig{Args: args, Env: env, Dir: dir, User: user, Capabilities: kept}
}

// A container, and the directory that describes it to runc.
type bundle struct {
	runc      *runc
	spec      garden.ContainerSpec
	directory string
	// The directory of a cgroup in which all its processes are.
	cgroup string
	init   *os.Process
	// Closed when its init has ended, and with that everything in it.
	ended chan struct{}
}

func (r *runc) create(spec garden.ContainerSpec) (*bundle, error) {
	if spec.Privileged {
		return nil, errors.New("privileged containers are not implemented with runc")
	}
	root, err := rootOf(spec)
	if err != nil {
		return nil, err
	}
	directory, err := os.MkdirTemp(r.directory, "bundle-")
	if err != nil {
		return nil, err
	}
	b := &bundle{runc: r, spec: spec, directory: directory, ended: make(chan struct{})}
	config := r.defaults
	config.Process = newProcessConfig([]string{initPath, "pause"}, nil, "/", userConfig{})
	config.Root = rootConfig{Path: root}
	config.Hostname = spec.Handle
	mount := func(from, to, mode string) {
		config.Mounts = append(config.Mounts, mountConfig{To: to, Type: "bind", From: from, Options: []string{"rbind", mode}})
	}
	config.Mounts = append([]mountConfig{}, config.Mounts...)
	mount(r.program, initPath, "ro")
	for _, wanted := range outerFirst(spec.BindMounts) {
		mode := "ro"
		if wanted.Mode == garden.BindMountModeRW {
			mode = "rw"
		}
		mount(wanted.SrcPath, wanted.DstPath, mode)
	}
	err = writeJSON(b.path("config.json"), config)
	if err == nil {
		err = b.run(b.command("run", "--detach", "--bundle", directory, "--pid-file", b.path("pid"), spec.Handle))
	}
	if err != nil {
		_ = os.RemoveAll(directory)
		if strings.Contains(err.Error(), "already exists") {
			return nil, errInUse(spec.Handle)
		}
		return nil, err
	}
	if b.init, err = findProcess(b.path("pid")); err != nil {
		return nil, err
	}
	go func() {
		_, _ = b.init.Wait()
		close(b.ended)
	}()
	if err := b.findCgroup(); err != nil {
		if destroyed := b.destroy(); destroyed != nil {
			return nil, fmt.Errorf("%w, and %v", err, destroyed)
		}
		return nil, err
	}
	return b, nil
}

func (b *bundle) findCgroup() error {
	text, err := os.ReadFile(filepath.Join(b.runc.directory, "state", b.spec.Handle, "state.json"))
	if err != nil {
		return err
	}
	var state struct {
		Cgroups map[string]string `json:"cgroup_paths"`
	}
	if err := json.Unmarshal(text, &state); err != nil {
		return err
	}
	// By controller, or the one of all controllers.
	b.cgroup = state.Cgroups["devices"]
	if b.cgroup == "" {
		b.cgroup = state.Cgroups[""]
	}
	return nil
}

func (b *bundle) path(name string) string { return filepath.Join(b.directory, name) }

func (b *bundle) command(arguments ...string) *exec.Cmd {
	global := []string{"--root", filepath.Join(b.runc.directory, "state"), "--log", b.path("log")}
	return exec.Command("runc", append(global, arguments...)...)
}

// Runs a command to its end. Why it failed stands in the log: what it writes may go where a process's output goes.
func (b *bundle) run(command *exec.Cmd) error {
	err := command.Run()
	if err == nil {
		return nil
	}
	log, _ := os.ReadFile(b.path("log"))
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return fmt.Errorf("runc: %w: %s", err, lines[len(lines)-1])
}

func (b *bundle) startProcess(spec garden.ProcessSpec, pio garden.ProcessIO) (*process, error) {
	if spec.TTY != nil {
		return nil, errors.New("terminals are not implemented with runc")
	}
	user, err := parseUser(spec.User)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join("/", spec.Dir)
	if err := os.MkdirAll(fmt.Sprintf("/proc/%d/root%s", b.init.Pid, dir), 0o755); err != nil {
		return nil, err
	}
	config, pid := b.path("process-"+spec.ID+".json"), b.path("process-"+spec.ID+".pid")
	args := append([]string{spec.Path}, spec.Args...)
	if err := writeJSON(config, newProcessConfig(args, environment(b.spec, spec), dir, user)); err != nil {
		return nil, err
	}
	command := b.command("exec", "--detach", "--process", config, "--pid-file", pid, b.spec.Handle)
	begin := func() (*os.Process, error) {
		err := b.run(command)
		if err == nil {
			return findProcess(pid)
		}
		for _, missing := range []string{"executable file not found", "no such file or directory"} {
			if strings.Contains(err.Error(), missing) {
				return nil, garden.ExecutableNotFoundError{Message: err.Error()}
			}
		}
		return nil, err
	}
	return startWith(command, begin, spec, pio)
}

// Kills everything in it but its init.
func (b *bundle) kill() error {
	for {
		text, err := os.ReadFile(filepath.Join(b.cgroup, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		left := 0
		for _, line := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(line); err == nil && pid != b.init.Pid {
				_ = syscall.Kill(pid, syscall.SIGKILL)
				left++
			}
		}
		if left == 0 {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
}

// Once its init is killed, all is: runc would kill it, too, and look a tenth of a second later whether it is gone.
func (b *bundle) destroy() error {
	_ = b.init.Kill()
	<-b.ended
	if err := b.run(b.command("delete", "--force", b.spec.Handle)); err != nil {
		return err
	}
	return os.RemoveAll(b.directory)
}

func writeJSON(path string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func findProcess(path string) (*os.Process, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		return nil, err
	}
	return os.FindProcess(pid)
}

// Root, or numbers: `uid` or `uid:gid`.
func parseUser(text string) (userConfig, error) {
	if text == "" || text == "root" {
		return userConfig{}, nil
	}
	first, second, both := strings.Cut(text, ":")
	if !both {
		second = "0"
	}
	uid, err := strconv.ParseUint(first, 10, 32)
	gid, wrong := strconv.ParseUint(second, 10, 32)
	if err != nil || wrong != nil {
		return userConfig{}, fmt.Errorf("the user %q: with runc only root and numbers are known", text)
	}
	return userConfig{User: uint32(uid), Group: uint32(gid)}, nil
}

// The init of a container: waits for processes that lost their parents, until it is killed.
func pause() {
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	for range children {
		for {
			if pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 {
				break
			}
		}
	}
}
