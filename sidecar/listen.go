package sidecar

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/rs/zerolog"

	"membrane/sidecar/engineport"
)

// maxSocketPath is what the kernel takes (unix(7)).
const maxSocketPath = 107

// listenHTTP opens the HTTP port.
func listenHTTP(s *Settings) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(s.Host, strconv.Itoa(s.Port)))
	if err != nil {
		return nil, &SettingError{"port", strconv.Itoa(s.Port), fmt.Sprintf("cannot listen there: %v", err)}
	}
	return l, nil
}

// listenGRPC opens the port for gRPC, nil if none is asked for.
func listenGRPC(s *Settings) (net.Listener, error) {
	if s.GRPCPort == portOff {
		return nil, nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort(s.Host, strconv.Itoa(s.GRPCPort)))
	if err != nil {
		return nil, &SettingError{"grpc-port", strconv.Itoa(s.GRPCPort), fmt.Sprintf("cannot listen there: %v", err)}
	}
	return l, nil
}

// listenServe opens the serving port, nil if none is asked for.
func listenServe(s *Settings) (net.Listener, error) {
	if s.ServePort == portOff {
		return nil, nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort(s.Host, strconv.Itoa(s.ServePort)))
	if err != nil {
		return nil, &SettingError{"serve-port", strconv.Itoa(s.ServePort), fmt.Sprintf("cannot listen there: %v", err)}
	}
	return l, nil
}

// listenEngines opens the engines' port. The default port may be another
// sidecar's on the same machine: then any free one will do, because engines
// find this sidecar by its socket or by the port that was logged.
func listenEngines(s *Settings, log zerolog.Logger) (net.Listener, error) {
	l, err := net.Listen("tcp", s.EngineAddr)
	if err != nil && s.engineAddrIsFree && errors.Is(err, syscall.EADDRINUSE) {
		log.Info().Str("wanted", s.EngineAddr).Msg("the engines' port is taken, so any free one is used")
		l, err = net.Listen("tcp", "127.0.0.1:0")
	}
	if err != nil {
		return nil, &SettingError{"engine-addr", s.EngineAddr, fmt.Sprintf("cannot listen there: %v", err)}
	}
	return l, nil
}

// listenSocket opens the engine socket: where the settings say, else at the
// default path, else, when this user cannot have that or another sidecar has
// it, in a directory of the user's.
func listenSocket(s *Settings, log zerolog.Logger) (*net.UnixListener, error) {
	if s.EngineSocket != "" {
		return openSocket("engine-socket", s.EngineSocket)
	}
	l, err := engineport.ListenSocket(DefaultEngineSocket)
	if err == nil {
		return l, nil
	}
	dir, dirErr := userDir()
	if dirErr != nil {
		return nil, noSocket(errors.Join(err, dirErr))
	}
	for _, name := range []string{s.NodeID, s.NodeID + "-" + strconv.Itoa(os.Getpid())} {
		path := filepath.Join(dir, name, "engine.sock")
		l, pathErr := openSocket("engine-socket", path)
		if pathErr == nil {
			log.Info().Str("path", path).Str("wanted", DefaultEngineSocket).AnErr("because", err).Msg("the engine socket is in the user's directory")
			return l, nil
		}
		err = errors.Join(err, pathErr)
	}
	return nil, noSocket(err)
}

// noSocket says what to do when none of the places that are tried by default
// will do.
func noSocket(err error) error {
	return fmt.Errorf("there is no place for the engine socket: name one with --engine-socket PATH, in a folder that this user can write\n%w", err)
}

func openSocket(flag, path string) (*net.UnixListener, error) {
	path, err := filepath.Abs(path) // engines are told the path and have another working directory
	if err != nil {
		return nil, &SettingError{flag, path, err.Error()}
	}
	if len(path) > maxSocketPath {
		return nil, &SettingError{flag, path, fmt.Sprintf("has %d bytes, a socket's path has at most %d", len(path), maxSocketPath)}
	}
	l, err := engineport.ListenSocket(path)
	if err != nil {
		return nil, &SettingError{flag, path, err.Error()}
	}
	return l, nil
}

// userDir returns a directory for sockets that only this user can change.
func userDir() (string, error) {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" && filepath.IsAbs(dir) {
		return filepath.Join(dir, "membrane"), nil
	}
	dir := filepath.Join(os.TempDir(), "membrane-"+strconv.Itoa(os.Geteuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("cannot make directory %q: %w", dir, err)
	}
	// Anybody can make that name in a shared temporary directory first.
	st, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("cannot look at directory %q: %w", dir, err)
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.IsDir() || int(owner.Uid) != os.Geteuid() || st.Mode().Perm()&0o022 != 0 {
		return "", fmt.Errorf("cannot use directory %q: it is not only this user's", dir)
	}
	return dir, nil
}
