package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"code.cloudfoundry.org/garden"
)

var shared = []string{"usr", "bin", "sbin", "lib", "lib64", "etc", "dev", "proc"}

// Takes a place in a mount namespace that this process has for itself, and becomes its program. Returns only when it cannot.
func enter(text string) error {
	var p place
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return err
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	for _, b := range p.Binds {
		if err := syscall.Mount(b.From, b.To, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
		if b.ReadOnly {
			flags := uintptr(syscall.MS_BIND | syscall.MS_REMOUNT | syscall.MS_RDONLY)
			if err := syscall.Mount("", b.To, "", flags, ""); err != nil {
				return err
			}
		}
	}
	if err := syscall.Chroot(p.Root); err != nil {
		return err
	}
	if err := os.Chdir(p.Dir); err != nil {
		return err
	}
	return syscall.Exec(p.Path, p.Args, p.Env)
}

// Finds the place of a process, and makes the directories where something is mounted and where it starts.
func findPlace(container garden.ContainerSpec, spec garden.ProcessSpec) (place, error) {
	root, err := rootOf(container)
	if err != nil {
		return place{}, err
	}
	p := place{Root: root, Dir: filepath.Join("/", spec.Dir)}
	for _, name := range shared {
		to := filepath.Join(root, name)
		entries, err := os.ReadDir(to)
		from, missing := filepath.EvalSymlinks("/" + name)
		if err == nil && len(entries) == 0 && missing == nil {
			p.Binds = append(p.Binds, bind{From: from, To: to})
		}
	}
	// Where a path inside is on the machine: in the mount that is nearest above, or in the root.
	real := func(inside string) string {
		for i := len(p.Binds) - 1; i >= 0; i-- {
			from, to, whole := p.Binds[i].From, p.Binds[i].To+"/", filepath.Join(root, inside)+"/"
			if strings.HasPrefix(whole, to) {
				return filepath.Join(from, strings.TrimPrefix(whole, to))
			}
		}
		return filepath.Join(root, inside)
	}
	for _, mount := range outerFirst(container.BindMounts) {
		if err := os.MkdirAll(real(mount.DstPath), 0o755); err != nil {
			return place{}, err
		}
		to := filepath.Join(root, mount.DstPath)
		readOnly := mount.Mode != garden.BindMountModeRW
		p.Binds = append(p.Binds, bind{From: mount.SrcPath, To: to, ReadOnly: readOnly})
	}
	if err := os.MkdirAll(real(p.Dir), 0o755); err != nil {
		return place{}, err
	}

	p.Env = environment(container, spec)
	path, err := lookUp(spec.Path, p.Env, real)
	if err != nil {
		return place{}, err
	}
	p.Path, p.Args = path, append([]string{spec.Path}, spec.Args...)
	return p, nil
}

func rootOf(container garden.ContainerSpec) (string, error) {
	root := strings.TrimPrefix(container.RootFSPath, "raw://")
	if !filepath.IsAbs(root) {
		return "", errors.New("unsupported rootfs: " + container.RootFSPath)
	}
	return root, nil
}

func outerFirst(mounts []garden.BindMount) []garden.BindMount {
	sorted := append([]garden.BindMount{}, mounts...)
	sort.SliceStable(sorted, func(i, j int) bool { return sorted[i].DstPath < sorted[j].DstPath })
	return sorted
}

// Of a process. The last of a name counts.
func environment(container garden.ContainerSpec, spec garden.ProcessSpec) []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, pair := range append(append([]string{}, container.Env...), spec.Env...) {
		name, _, _ := strings.Cut(pair, "=")
		kept := env[:0]
		for _, other := range env {
			if !strings.HasPrefix(other, name+"=") {
				kept = append(kept, other)
			}
		}
		env = append(kept, pair)
	}
	return env
}

func lookUp(program string, env []string, real func(string) string) (string, error) {
	candidates := []string{program}
	if !strings.Contains(program, "/") {
		candidates = nil
		for _, pair := range env {
			if !strings.HasPrefix(pair, "PATH=") {
				continue
			}
			for _, dir := range filepath.SplitList(strings.TrimPrefix(pair, "PATH=")) {
				candidates = append(candidates, filepath.Join(dir, program))
			}
		}
	}
	for _, candidate := range candidates {
		info, err := os.Stat(real(candidate))
		if err != nil || info.IsDir() {
			continue
		}
		if info.Mode()&0o111 == 0 {
			return "", errors.New("exec: \"" + candidate + "\": permission denied")
		}
		return candidate, nil
	}
	return "", garden.ExecutableNotFoundError{Message: "exec: \"" + program + "\": executable file not found in $PATH"}
}
