package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"code.cloudfoundry.org/garden"
)

// From SIGTERM to SIGKILL.
const grace = 10 * time.Second

type process struct {
	id      string
	command *exec.Cmd
	// Starts it by that command, and answers what it is.
	begin   func() (*os.Process, error)
	running *os.Process
	stdin   io.WriteCloser
	// Our end of it. Nil: it has none.
	terminal *os.File
	pumps    sync.WaitGroup

	lock     sync.Mutex
	changed  *sync.Cond
	attached *garden.ProcessIO
	exited   bool

	done   chan struct{}
	status int
}

func startProcess(container garden.ContainerSpec, spec garden.ProcessSpec, pio garden.ProcessIO) (*process, error) {
	place, err := findPlace(container, spec)
	if err != nil {
		return nil, err
	}
	text, err := place.encode()
	if err != nil {
		return nil, err
	}
	command := exec.Command("/proc/self/exe", "enter", text)
	command.Env = []string{}
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Cloneflags: syscall.CLONE_NEWNS}
	begin := func() (*os.Process, error) {
		err := command.Start()
		return command.Process, err
	}
	return startWith(command, begin, spec, pio)
}

func startWith(
	command *exec.Cmd,
	begin func() (*os.Process, error),
	spec garden.ProcessSpec,
	pio garden.ProcessIO,
) (*process, error) {
	p := &process{id: spec.ID, command: command, begin: begin, done: make(chan struct{})}
	p.changed = sync.NewCond(&p.lock)
	var err error
	if spec.TTY != nil {
		err = p.startOnTerminal(spec.TTY, pio)
	} else {
		err = p.startOnPipes(pio)
	}
	if err != nil {
		return nil, err
	}
	go func() {
		ended, _ := p.running.Wait()
		p.lock.Lock()
		p.exited = true
		p.changed.Broadcast()
		p.lock.Unlock()
		// What it left behind may keep its output open: that ends with it.
		_ = syscall.Kill(-p.running.Pid, syscall.SIGKILL)
		p.pumps.Wait()
		state := ended.Sys().(syscall.WaitStatus)
		p.status = state.ExitStatus()
		if state.Signaled() {
			p.status = 128 + int(state.Signal())
		}
		close(p.done)
	}()
	return p, nil
}

func (p *process) startOnPipes(pio garden.ProcessIO) error {
	stdinRead, stdinWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	errRead, errWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	p.command.Stdin, p.command.Stdout, p.command.Stderr = stdinRead, outWrite, errWrite
	p.running, err = p.begin()
	for _, theirs := range []*os.File{stdinRead, outWrite, errWrite} {
		_ = theirs.Close()
	}
	if err != nil {
		return err
	}
	p.stdin = stdinWrite
	p.attach(pio)

	p.pumps.Add(2)
	go p.pump(outRead, func(pio *garden.ProcessIO) io.Writer { return pio.Stdout })
	go p.pump(errRead, func(pio *garden.ProcessIO) io.Writer { return pio.Stderr })
	return nil
}

func (p *process) startOnTerminal(tty *garden.TTYSpec, pio garden.ProcessIO) error {
	ours, theirs, err := openTerminal(tty.WindowSize)
	if err != nil {
		return err
	}
	input, err := syscall.Dup(int(ours.Fd()))
	if err != nil {
		return err
	}
	syscall.CloseOnExec(input)
	p.command.Stdin, p.command.Stdout, p.command.Stderr = theirs, theirs, theirs
	// A session of its own is a group of its own, too.
	p.command.SysProcAttr.Setpgid = false
	p.command.SysProcAttr.Setsid = true
	p.command.SysProcAttr.Setctty = true
	p.running, err = p.begin()
	_ = theirs.Close()
	if err != nil {
		return err
	}
	p.stdin = os.NewFile(uintptr(input), "terminal")
	p.terminal = ours
	p.attach(pio)

	p.pumps.Add(1)
	go p.pump(ours, func(pio *garden.ProcessIO) io.Writer { return pio.Stdout })
	return nil
}

// Copies output to whoever is attached. While nobody is, it stays in the pipe.
func (p *process) pump(output *os.File, which func(*garden.ProcessIO) io.Writer) {
	defer p.pumps.Done()
	defer output.Close()
	part := make([]byte, 32<<10)
	for {
		p.lock.Lock()
		for p.attached == nil && !p.exited {
			p.changed.Wait()
		}
		p.lock.Unlock()
		n, err := output.Read(part)
		p.lock.Lock()
		attached := p.attached
		p.lock.Unlock()
		if n > 0 && attached != nil {
			if writer := which(attached); writer != nil {
				_, _ = writer.Write(part[:n])
			}
		}
		if err != nil {
			return
		}
	}
}

// The newest takes the output over. Its input is copied until it ends, which ends the process's; or until its client is gone.
func (p *process) attach(pio garden.ProcessIO) {
	p.lock.Lock()
	p.attached = &pio
	p.changed.Broadcast()
	p.lock.Unlock()
	if pio.Stdin == nil {
		return
	}
	go func() {
		// What a process no longer reads is thrown away.
		_, err := io.Copy(forgiving{p.stdin}, pio.Stdin)
		if err == nil {
			_ = p.stdin.Close()
			return
		}
		p.lock.Lock()
		if p.attached == &pio {
			p.attached = nil
		}
		p.lock.Unlock()
	}()
}

type forgiving struct{ io.Writer }

func (f forgiving) Write(part []byte) (int, error) {
	_, _ = f.Writer.Write(part)
	return len(part), nil
}

func (p *process) ID() string { return p.id }

func (p *process) Wait() (int, error) {
	<-p.done
	return p.status, nil
}

func (p *process) SetTTY(tty garden.TTYSpec) error {
	if p.terminal == nil || tty.WindowSize == nil {
		return errors.New("no terminal")
	}
	return resize(p.terminal, tty.WindowSize)
}

func (p *process) Signal(signal garden.Signal) error {
	if signal == garden.SignalKill {
		return p.kill(syscall.SIGKILL)
	}
	return p.kill(syscall.SIGTERM)
}

func (p *process) kill(signal syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
		return syscall.Kill(-p.running.Pid, signal)
	}
}

func (p *process) stop(kill bool) {
	if !kill {
		_ = p.kill(syscall.SIGTERM)
		select {
		case <-p.done:
			return
		case <-time.After(grace):
		}
	}
	_ = p.kill(syscall.SIGKILL)
	<-p.done
}
