// A Garden server for tests: the genuine server package over a backend that starts processes of this machine, each in a mount namespace of
// its own with the container's root and bind mounts. It prints the address at which it listens, and ends when its standard input does,
// or when it is told to.
//
// With --runc its containers are real. Then it has to be linked statically (CGO_ENABLED=0), for it is also what they begin with.
//
// Without, an empty directory at the top of a root that bears the name of one of the machine's shows that one.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"

	"code.cloudfoundry.org/garden/server"
	"code.cloudfoundry.org/lager"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "enter" {
		fmt.Fprintln(os.Stderr, enter(os.Args[2]))
		os.Exit(127)
	}
	if len(os.Args) == 2 && os.Args[1] == "pause" {
		pause()
	}
	withRunc := flag.Bool("runc", false, "make containers with runc")
	flag.Parse()
	if err := serve(*withRunc); err != nil {
		fmt.Fprintln(os.Stderr, "garden-server:", err)
		os.Exit(1)
	}
}

func serve(withRunc bool) error {
	// The package listens by itself, so a free port is found first.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		return err
	}
	backend := newBackend()
	if withRunc {
		if backend.runc, err = newRunc(); err != nil {
			return err
		}
	}
	garden := server.New("tcp", address, 0, backend, lager.NewLogger("garden"))
	if err := garden.SetupBomberman(); err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() { failed <- garden.ListenAndServe() }()
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	told := make(chan os.Signal, 1)
	signal.Notify(told, os.Interrupt, syscall.SIGTERM)
	fmt.Println(address)
	select {
	case err := <-failed:
		return err
	case <-ended:
	case <-told:
	}
	backend.killAll()
	return nil
}

// What a process needs to know to take its place.
type place struct {
	Root  string
	Binds []bind
	Dir   string
	Path  string
	Args  []string
	Env   []string
}

type bind struct {
	From, To string
	ReadOnly bool
}

func (p place) encode() (string, error) {
	text, err := json.Marshal(p)
	return string(text), err
}
